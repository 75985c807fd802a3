package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// runCompletion prints a script that completes commands and their flags in a shell.
func runCompletion(_ context.Context, p *process, args []string) error {
	shell, err := p.parseOne(p.flags("completion"), args)
	if err != nil {
		return err
	}
	switch shell {
	case "bash":
		completeBash(p.out)
	case "zsh":
		completeZsh(p.out)
	case "fish":
		completeFish(p.out)
	default:
		return fmt.Errorf("completion: want bash, zsh or fish: %w", errUsage)
	}
	return nil
}

var flagWord = regexp.MustCompile(`--[a-z-]+`)

// flagsOf are the flags that a command's help line names.
func flagsOf(c command) []string {
	words := flagWord.FindAllString(c.args, -1)
	slices.Sort(words)
	return slices.Compact(words)
}

// otherWords are what may follow a command besides flags.
func otherWords(c command) []string {
	if c.name == "completion" {
		return []string{"bash", "zsh", "fish"}
	}
	if c.name == "mode" {
		return []string{"shadow", "on"}
	}
	return nil
}

func completeBash(w io.Writer) {
	var names []string
	for _, c := range completable() {
		names = append(names, c.name)
	}
	fmt.Fprintf(w, "# source <(grapevine completion bash)\n_grapevine() {\n  local cur=${COMP_WORDS[COMP_CWORD]}\n  if [ \"$COMP_CWORD\" = 1 ]; then COMPREPLY=($(compgen -W %q -- \"$cur\")); return; fi\n  case ${COMP_WORDS[1]} in\n", strings.Join(names, " "))
	for _, c := range completable() {
		if words := append(flagsOf(c), otherWords(c)...); len(words) > 0 {
			fmt.Fprintf(w, "    %s) COMPREPLY=($(compgen -W %q -- \"$cur\")) ;;\n", c.name, strings.Join(words, " "))
		}
	}
	fmt.Fprint(w, "  esac\n}\ncomplete -o default -F _grapevine grapevine\n")
}

func completeZsh(w io.Writer) {
	fmt.Fprint(w, "#compdef grapevine\n# source <(grapevine completion zsh)\n_grapevine() {\n  if (( CURRENT == 2 )); then\n    local -a commands=(\n")
	for _, c := range completable() {
		fmt.Fprintf(w, "      %s\n", zshQuote(c.name+":"+strings.ReplaceAll(c.short, ":", "\\:")))
	}
	fmt.Fprint(w, "    )\n    _describe command commands\n    return\n  fi\n  case ${words[2]} in\n")
	for _, c := range completable() {
		if words := append(flagsOf(c), otherWords(c)...); len(words) > 0 {
			fmt.Fprintf(w, "    %s) compadd -- %s; _files ;;\n", c.name, strings.Join(words, " "))
		}
	}
	fmt.Fprint(w, "  esac\n}\ncompdef _grapevine grapevine\n")
}

func zshQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func completeFish(w io.Writer) {
	fmt.Fprint(w, "# grapevine completion fish | source\n")
	for _, c := range completable() {
		fmt.Fprintf(w, "complete -c grapevine -n __fish_use_subcommand -f -a %s -d %s\n", c.name, zshQuote(c.short))
		for _, f := range flagsOf(c) {
			fmt.Fprintf(w, "complete -c grapevine -n '__fish_seen_subcommand_from %s' -l %s\n", c.name, strings.TrimPrefix(f, "--"))
		}
		if words := otherWords(c); len(words) > 0 {
			fmt.Fprintf(w, "complete -c grapevine -n '__fish_seen_subcommand_from %s' -f -a '%s'\n", c.name, strings.Join(words, " "))
		}
	}
}

// completable are the commands and help.
func completable() []command {
	return append(commands(), command{name: "help", short: "list the commands", run: func(context.Context, *process, []string) error { return flag.ErrHelp }})
}
