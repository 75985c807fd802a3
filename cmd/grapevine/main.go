// Command grapevine is the agent beside each inference replica, and the tools around it. Without a command it is the
// agent. See "grapevine help".
//
// Exit codes: 0 success, 1 failure, 2 wrong usage or configuration.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

// command is one subcommand. run gets the arguments after the command's name.
type command struct {
	name, args, short string
	run               func(ctx context.Context, p *process, args []string) error
}

// commands in the order of the help.
func commands() []command {
	return []command{
		{"agent", "", "run the agent beside an engine (the default); all settings come from GRAPEVINE_ variables", runAgent},
		{"demo", "[--duration 30s] [--replicas 4] [--slow 0.5] [--seed 1] [--json]", "a fleet of simulated engines with real agents in one process, against round robin", runDemo},
		{"status", "[--url URL] [--json | --quiet]", "what an agent knows about its replica and the others", runStatus},
		{"top", "[--url URL] [--sort COLUMN] [--every 1s] [--once]", "the replicas, live; s sorts by another column, r turns the order, q ends", runTop},
		{"explain", "[--url URL] [--json] [FILE | ID | --model M --tokens N]", "where a request would go now and why, or where a past one went", runExplain},
		{"check", "[--json]", "try out what an agent with this environment needs: engine, GPU, ports, key, names, peers", runCheck},
		{"mode", "[--url URL] [shadow | on]", "print the fleet's mode, or switch it: in shadow mode requests stay and only the picks are recorded", runMode},
		{"drain", "[--url URL] [--no-wait]", "let an agent finish what it has and take nothing new", runDrain},
		{"sim", "[--policy auto,exact] [--replicas 16] [--load 0.85 | --rate 60] [--find-replicas] [-h]", "how a policy does on a trace, or how many replicas a load needs, in virtual time", runSim},
		{"config", "[--json | --docs | --metrics]", "the effective settings, or all variables or metrics as a Markdown table", runConfig},
		{"completion", "bash | zsh | fish", "print a completion script for a shell", runCompletion},
		{"keys", "[--url URL] [--here] list | install FILE | use ID | remove ID", "the gossip keys of all agents (--here: of one) by their ids; a key comes from a file, or from standard input as -", runKeys},
		{"keygen", "", "make a gossip key", runKeygen},
		{"version", "", "print the version", runVersion},
	}
}

// process is what a command may use of the world around it, so that tests can run one.
type process struct {
	out, err io.Writer
	environ  []string
	terminal bool // out is a terminal: colours and redrawing are welcome
}

// errUsage marks an error that comes from how the command was called; it makes exit code 2.
var errUsage = errors.New("usage")

func main() {
	p := &process{out: os.Stdout, err: os.Stderr, environ: os.Environ(), terminal: isTerminal(os.Stdout)}
	os.Exit(p.main(context.Background(), os.Args[1:]))
}

// main finds the command, runs it and turns its error into an exit code.
func (p *process) main(ctx context.Context, args []string) int {
	name := "agent"
	if len(args) > 0 && (!strings.HasPrefix(args[0], "-") || args[0] == "-h" || args[0] == "--help") {
		name, args = args[0], args[1:]
	}
	switch name {
	case "help", "-h", "--help":
		p.help(p.out)
		return exitOK
	}
	for _, c := range commands() {
		if c.name != name {
			continue
		}
		err := c.run(ctx, p, args)
		switch {
		case err == nil:
			return exitOK
		case errors.Is(err, flag.ErrHelp):
			return exitOK
		case errors.Is(err, errUsage):
			fmt.Fprintln(p.err, strings.TrimSuffix(err.Error(), ": "+errUsage.Error()))
			return exitUsage
		}
		fmt.Fprintln(p.err, "grapevine "+name+": "+err.Error())
		return exitFailure
	}
	fmt.Fprintf(p.err, "grapevine: unknown command %q\n\n", name)
	p.help(p.err)
	return exitUsage
}

func (p *process) help(w io.Writer) {
	fmt.Fprint(w, "grapevine puts an agent beside each inference replica; any agent answers for the whole fleet.\n\n")
	for _, c := range commands() {
		fmt.Fprintf(w, "  grapevine %-10s %s\n%23s%s\n", c.name, c.args, "", c.short)
	}
	fmt.Fprint(w, "\nVariables: grapevine config --docs. Exit codes: 0 success, 1 failure, 2 wrong usage or configuration.\n")
}

// flags makes a flag set that reports in our manner.
func (p *process) flags(name string) *flag.FlagSet {
	f := flag.NewFlagSet("grapevine "+name, flag.ContinueOnError)
	f.SetOutput(p.err)
	return f
}

// parse parses args, and refuses what is left over.
func (p *process) parse(f *flag.FlagSet, args []string) error {
	if err := p.parseFlags(f, args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("%s: unexpected argument %q: %w", f.Name(), f.Arg(0), errUsage)
	}
	return nil
}

func (p *process) parseFlags(f *flag.FlagSet, args []string) error {
	err := f.Parse(args)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return err
	}
	return fmt.Errorf("see %s -h: %w", f.Name(), errUsage)
}

// parseOne is parse for a command that takes one argument at most, before or after its flags.
func (p *process) parseOne(f *flag.FlagSet, args []string) (arg string, err error) {
	if err := p.parseFlags(f, args); err != nil || f.NArg() == 0 {
		return "", err
	}
	arg = f.Arg(0)
	return arg, p.parse(f, f.Args()[1:])
}

// isTerminal reports whether f is a terminal that takes escape sequences.
func isTerminal(f *os.File) bool {
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && st.Mode()&os.ModeDevice != 0 &&
		os.Getenv("TERM") != "" && os.Getenv("TERM") != "dumb" && os.Getenv("NO_COLOR") == "" && f.Name() != os.DevNull
}
