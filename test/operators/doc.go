// Package operators tests what the people meet who run grapevine: the page in a real browser, the terminal commands, shadow
// mode, proxies in front, traces. It needs real processes and much time, so most of it runs with -long only.
package operators
