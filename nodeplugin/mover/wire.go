package mover

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/longshore-io/longshore/nodeplugin/fault"
	"github.com/longshore-io/longshore/nodeplugin/journal"
)

// kind says what a packet on the control socket is.
type kind uint16

const (
	// From the node.
	partOf  kind = iota + 1 // Text is the next part of the job, A the bytes of all
	proceed                 // the facts are on record
	dialled                 // the answer to dial ID, with the connection
	refused                 // the answer to dial ID: fault
	durable                 // all done up to ID is

	// From the mover.
	found    // Text: Facts as JSON
	dial     // ID; Text: network, space, address
	done     // ID counts up; A: offset, B: length, C: how many of these bytes were read for it; Text: the hashes of what is there, as digest.Sums has them, none for zeros
	progress // A: bytes done, B: bytes read
	hashed   // A: bytes that are summed up; Text: the state of the hash
	flush    // all that is done is to become durable soon
	result   // Flags: ok, or fault; A: bytes of the disk
)

const (
	ok       uint16 = 1 << iota // of a result: it went well
	terminal                    // of a fault; its Text is the reason, a line feed, the message

	headBytes = 40
	// packetBytes is the most that a packet has.
	packetBytes = 4096
	textBytes   = packetBytes - headBytes

	// maxJob bounds the job's JSON, with the source's parameters, maxMessage all
	// that is sent of it, with the ranges that are done.
	maxJob     = 256 << 10
	maxMessage = maxJob + 2<<20
)

// packet is one message on the control socket, which keeps their boundaries.
type packet struct {
	Kind    kind
	Flags   uint16
	ID      uint64
	A, B, C int64
	Text    []byte
}

func (p packet) encode() ([]byte, error) {
	if len(p.Text) > textBytes {
		return nil, fmt.Errorf("a packet with %d bytes of text, at most %d", len(p.Text), textBytes)
	}
	b := make([]byte, headBytes, headBytes+len(p.Text))
	binary.LittleEndian.PutUint16(b[0:], uint16(p.Kind))
	binary.LittleEndian.PutUint16(b[2:], p.Flags)
	binary.LittleEndian.PutUint32(b[4:], uint32(len(p.Text)))
	binary.LittleEndian.PutUint64(b[8:], p.ID)
	binary.LittleEndian.PutUint64(b[16:], uint64(p.A))
	binary.LittleEndian.PutUint64(b[24:], uint64(p.B))
	binary.LittleEndian.PutUint64(b[32:], uint64(p.C))
	return append(b, p.Text...), nil
}

func decode(b []byte) (packet, error) {
	if len(b) < headBytes {
		return packet{}, fmt.Errorf("a packet of %d bytes, at least %d", len(b), headBytes)
	}
	p := packet{
		Kind: kind(binary.LittleEndian.Uint16(b[0:])), Flags: binary.LittleEndian.Uint16(b[2:]),
		ID: binary.LittleEndian.Uint64(b[8:]),
		A:  int64(binary.LittleEndian.Uint64(b[16:])), B: int64(binary.LittleEndian.Uint64(b[24:])), C: int64(binary.LittleEndian.Uint64(b[32:])),
		Text: b[headBytes:],
	}
	if n := binary.LittleEndian.Uint32(b[4:]); int64(n) != int64(len(p.Text)) {
		return packet{}, fmt.Errorf("a packet with %d bytes of text says %d", len(p.Text), n)
	}
	return p, nil
}

// socket is one end of the control socket. It may be written by many at once and
// is read by one.
type socket struct {
	conn *net.UnixConn
	buf  [packetBytes + 1]byte
}

// newSocket takes f over.
func newSocket(f *os.File) (*socket, error) {
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use the control socket: %w", err)
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("use the control socket: it is a %T", conn)
	}
	return &socket{conn: unixConn}, nil
}

// socketPair returns both ends of a new control socket.
func socketPair() (ours *socket, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a control socket: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "control")
	if ours, err = newSocket(os.NewFile(uintptr(fds[0]), "control")); err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

func (s *socket) send(p packet) error {
	b, err := p.encode()
	if err != nil {
		return err
	}
	_, err = s.conn.Write(b) // write(2): a mover may not sendmsg
	return err
}

// sendWith also hands over the descriptor of conn.
func (s *socket) sendWith(p packet, conn syscall.RawConn) error {
	b, err := p.encode()
	if err != nil {
		return err
	}
	var serr error
	if err := conn.Control(func(fd uintptr) { _, _, serr = s.conn.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil) }); err != nil {
		return err
	}
	return serr
}

// receive returns the next packet, valid until the next call, and io.EOF when the
// other end is gone. Descriptors that come along are not taken.
func (s *socket) receive() (packet, error) {
	n, err := s.conn.Read(s.buf[:])
	return s.received(n, err)
}

// receiveWith also returns the descriptor that came with the packet, if one did.
func (s *socket) receiveWith() (packet, *os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := s.conn.ReadMsgUnix(s.buf[:], oob)
	p, err := s.received(n, err)
	if err != nil {
		return p, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:m])
	if err != nil || len(messages) == 0 {
		return p, nil, err
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return p, nil, errors.Join(err, fmt.Errorf("%d descriptors with one packet", len(fds)))
	}
	return p, os.NewFile(uintptr(fds[0]), "connection"), nil
}

func (s *socket) received(n int, err error) (packet, error) {
	if err != nil {
		return packet{}, err
	}
	if n == 0 {
		return packet{}, io.EOF
	}
	if n > packetBytes {
		return packet{}, fmt.Errorf("a packet of more than %d bytes", packetBytes)
	}
	return decode(s.buf[:n])
}

// sendJob sends j in parts: the length of its JSON, the JSON, the done ranges.
func (s *socket) sendJob(j Job) error {
	text, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("encode the job: %w", err)
	}
	if len(text) > maxJob {
		return fault.Terminal(fault.InvalidSource, fmt.Errorf("the source's parameters make a job of %d bytes, at most %d: use a shorter certificate bundle or fewer headers", len(text), maxJob))
	}
	all := binary.LittleEndian.AppendUint32(nil, uint32(len(text)))
	all = journal.AppendRanges(append(all, text...), j.Done)
	for rest := all; len(rest) > 0; {
		n := min(len(rest), textBytes)
		if err := s.send(packet{Kind: partOf, A: int64(len(all)), Text: rest[:n]}); err != nil {
			return fmt.Errorf("hand the mover its job: %w", err)
		}
		rest = rest[n:]
	}
	return nil
}

func (s *socket) receiveJob() (Job, error) {
	var all []byte
	for total := int64(1); int64(len(all)) < total; {
		p, err := s.receive()
		if err != nil {
			return Job{}, err
		}
		if p.Kind != partOf || p.A > maxMessage {
			return Job{}, fmt.Errorf("packet of kind %d, %d bytes, where the job is expected", p.Kind, p.A)
		}
		all, total = append(all, p.Text...), p.A
	}
	if len(all) < 4 || int64(binary.LittleEndian.Uint32(all)) > int64(len(all)-4) {
		return Job{}, fmt.Errorf("a job of %d bytes is cut short", len(all))
	}
	n := 4 + int(binary.LittleEndian.Uint32(all))
	var j Job
	if err := json.Unmarshal(all[4:n], &j); err != nil {
		return Job{}, fmt.Errorf("decode the job: %w", err)
	}
	var err error
	if j.Done, err = journal.ParseRanges(all[n:], j.TargetBytes); err != nil {
		return Job{}, fmt.Errorf("decode what is done: %w", err)
	}
	return j, nil
}

// faultPacket makes p carry err.
func (p packet) withFault(err error) packet {
	f := fault.Of(err)
	p.Flags &^= ok | terminal
	if f.Terminal {
		p.Flags |= terminal
	}
	p.Text = []byte(f.Reason + "\n" + f.Error())
	if len(p.Text) > textBytes {
		p.Text = p.Text[:textBytes]
	}
	return p
}

// fault is what a packet carries; it was written by someone who is not trusted.
func (p packet) fault() error {
	reason, message, _ := strings.Cut(string(p.Text), "\n")
	reason = clean(reason, 64)
	for _, r := range reason {
		if !unicode.IsLetter(r) && !unicode.IsDigit(r) {
			reason = fault.Error
			break
		}
	}
	if reason == "" {
		reason = fault.Error
	}
	return &fault.Fault{Terminal: p.Flags&terminal != 0, Reason: reason, Err: errors.New(clean(message, 2048))}
}

// clean makes s one line of at most n bytes of valid, printable UTF-8.
func clean(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return strings.TrimSpace(s)
}

// encodeFacts returns f as a packet's text, without the warnings that it has no
// room for.
func encodeFacts(f Facts) ([]byte, error) {
	for {
		text, err := json.Marshal(f)
		if err != nil || len(text) <= textBytes {
			return text, err
		}
		if len(f.Warnings) == 0 {
			return nil, fmt.Errorf("facts of %d bytes: the source's validator is too long", len(text))
		}
		f.Warnings = f.Warnings[:len(f.Warnings)-1]
	}
}

// decodeFacts is the inverse; the facts come from someone who is not trusted.
func decodeFacts(text []byte) (Facts, error) {
	var f Facts
	if err := json.Unmarshal(text, &f); err != nil {
		return Facts{}, fmt.Errorf("decode the facts: %w", err)
	}
	f.Format, f.Compression = clean(f.Format, 32), clean(f.Compression, 32)
	f.Validator.ETag = clean(f.Validator.ETag, 1024)
	f.Validator.LastModified = clean(f.Validator.LastModified, 128)
	f.Validator.Digest = clean(f.Validator.Digest, 256)
	for i, w := range f.Warnings {
		f.Warnings[i] = clean(w, 512)
	}
	return f, nil
}
