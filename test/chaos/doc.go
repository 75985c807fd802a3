// Package chaos has no code of its own: its tests start real agents and engines as processes, break them one way after another
// under load, and print for each way what clients noticed.
//
//	go test ./test/chaos -count=1          kill -9 of an engine, shortened, and llama.cpp where it is installed
//	go test ./test/chaos -count=1 -long    all of them, under 9 minutes
//
// Engines are simulated (test/fakeengine) and keep journals, which show what ran where and when; continuing a broken stream is
// shown with real llama.cpp servers too.
package chaos
