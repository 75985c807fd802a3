// Package hostile holds tests in which somebody means harm: clients that send what no client should, strangers on the network
// of the agents, and clients that are slow on purpose.
//
//	go test ./test/hostile                                  what a change must pass; needs Debian's nginx and haproxy for the whole table
//	go test ./test/hostile -long                            Envoy as a further column, and more connections
//	go test ./test/hostile -run Differential -v             prints the tables of input classes and of engines' answers
//	go test ./test/hostile -run CasesCoverage -update       rewrites testdata/cases.md, the table of cases and their tests
//
// SECURITY.md says against whom.
package hostile
