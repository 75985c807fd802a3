package proxy

// hangups tells connections when the other side has ended, without a read for each of them: on Linux one epoll set
// for all, in which a connection costs one call in its whole life. Where that is not to be had, each exchange keeps a
// read of one byte under way, as net/http does. The same set reads the established event streams. It works while a server
// is open.
type hangups struct {
	hangupSet
}

// ender is told that the other side of its connection has ended.
type ender interface{ hungUp() }
