// Package e2e runs grapevine as operators and clients meet it: agent processes, engine processes, sockets, signals, and the
// official OpenAI clients. What the tests stand on is in the package harness.
//
//	go test ./test/e2e                        the smoke test, some seconds
//	go test ./test/e2e -long -timeout 25m     everything; needs test/engines/install.sh llamacpp once
//	go test ./test/e2e -long -run StartUp -update     rewrites the golden tables in testdata
//
// With -artifacts the logs of all processes are kept. E2E_RACE=1 builds the processes with the race detector.
package e2e
