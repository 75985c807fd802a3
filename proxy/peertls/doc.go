// Package peertls proves to each other that two agents belong to one cluster, with no set-up beyond the
// gossip key ring.
//
// From each key of its ring an agent derives a certificate authority (an Ed25519 key seeded by HKDF, the same
// bytes on every agent) and issues itself a leaf for its boot id under each. A dialler sends the ids of its
// keys in the server name; the listener takes the newest of its own keys that is among them, answers with its
// leaf under that key and names that authority as the only acceptable one, which tells the dialler which leaf
// to show. So a ring can be rotated key by key while everything keeps talking. Validity plays no part: leaves
// are good for all time and die with their key or their process, so that no clock matters.
//
// A dialler demands the boot id that it means to reach. A listener accepts every valid leaf, of a known member
// or not, but not of one that left. A connection is remembered with its key: when the key leaves the ring the
// connection is closed.
//
// The files variant uses certificates that an operator made. They name no boot id, so only membership is
// proven there, and validity counts as usual. The files are read again when they change.
//
// An Identity is for concurrent use. Connections need some buffer of their own: over net.Pipe, which has none,
// a resumed handshake stands still, since both sides write at once.
package peertls
