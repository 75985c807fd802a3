// Package engines holds the tests against real inference engines: llama.cpp in every run that finds it installed, and
// with -long also vLLM, Infinity and Dynamo, which are installed on the way.
//
//	test/engines/install.sh llamacpp && go test ./test/engines -v      about two minutes
//	go test ./test/engines -long -v -timeout 60m                       plus the installation, 11 GB of disk
//
// Each engine runs as its own process on loopback with agents in front, and is asked by clients of ours. What the agents
// say is compared with what these clients do, and with the engine's own pages.
package engines
