// Package gpu reads the memory and the health of the cards that the replica's engine runs on, through NVML.
//
// NVML needs cgo, Linux and the driver's library on the host. Without one of these Open answers
// ErrUnavailable, which is a normal way to live and no fault. What a card does not tell is unknown, never
// zero. Which cards are ours is told by configuration or by what can be seen, and never guessed: see choose.
//
// A Reader is for concurrent use. The driver may hang for minutes when a card is sick, so it is asked by one
// goroutine at a time, and a Read that waits in vain returns an error while that goroutine lives on.
package gpu
