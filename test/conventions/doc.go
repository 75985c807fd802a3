// Package conventions holds tests about the repository itself: what may import what, what every package says of itself, what
// the product needs from others, what lies where, and that generated parts of README.md are up to date. Each test says why its
// rule is there.
//
//	go test ./test/conventions -update     rewrites the generated parts
package conventions
