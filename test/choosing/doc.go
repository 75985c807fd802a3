// Package choosing compares how real agents choose with the classic policies and with a twin that knows every engine's exact state.
// sockets, against round robin, the power of two choices, and a twin that knows the exact state of all engines.
package choosing
