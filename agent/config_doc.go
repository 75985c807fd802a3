package agent

import (
	"fmt"
	"reflect"
	"strings"
	"sync"
)

// Field is one variable as its tags describe it.
type Field struct {
	Variable string // with prefix
	Default  string // "" means none
	Allowed  string // what is accepted, in words
	Doc      string // one or two sentences
	Secret   bool   // its value is never shown

	name  string
	index int
	rule  rule
}

// Fields lists all variables in the order of Config.
var Fields = sync.OnceValue(func() []Field {
	var out []Field
	t := reflect.TypeFor[Config]()
	for i := range t.NumField() {
		sf := t.Field(i)
		name := sf.Tag.Get("env")
		if name == "" || name == "-" {
			continue
		}
		r := rule(sf.Tag.Get("is"))
		out = append(out, Field{
			Variable: Prefix + name,
			Default:  sf.Tag.Get("envDefault"),
			Allowed:  r.allowed(),
			Doc:      sf.Tag.Get("doc"),
			Secret:   sf.Tag.Get("secret") == "true",
			name:     sf.Name, index: i, rule: r,
		})
	}
	return out
})

func fieldNamed(name string) Field {
	for _, f := range Fields() {
		if f.name == name {
			return f
		}
	}
	return Field{Variable: name}
}

func variableNamed(variable string) Field {
	for _, f := range Fields() {
		if f.Variable == variable {
			return f
		}
	}
	return Field{Variable: variable}
}

// wrong is the one line that an operator sees for a value that breaks the field's rule.
func (f Field) wrong(value string) error {
	if f.Secret {
		value = mask
	}
	return &ConfigError{f.Variable, redactURL(value), "must be " + f.Allowed}
}

const mask = "***"

// ConfigDocs renders all variables as a Markdown table.
func ConfigDocs() string {
	var b strings.Builder
	b.WriteString("| Variable | Default | Allowed | Meaning |\n|---|---|---|---|\n")
	for _, f := range Fields() {
		def := "–"
		if f.Default != "" {
			def = "`" + f.Default + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Variable, def, strings.ReplaceAll(f.Allowed, "|", `\|`), strings.ReplaceAll(f.Doc, "|", `\|`))
	}
	return b.String()
}

// Setting is the effective value of one variable.
type Setting struct {
	Variable string `json:"variable"`
	Value    string `json:"value"`  // secrets masked
	Source   string `json:"source"` // "default", "environment", "derived"
}

// Effective lists what this configuration means, secrets masked, in the order of Config.
func (c *Config) Effective() []Setting {
	v := reflect.ValueOf(c).Elem()
	out := make([]Setting, 0, len(Fields()))
	for _, f := range Fields() {
		val := fmt.Sprint(v.Field(f.index).Interface())
		if l, ok := v.Field(f.index).Interface().([]string); ok {
			val = strings.Join(l, ",")
		}
		source := "default"
		switch {
		case c.Set[f.Variable]:
			source = "environment"
		case f.Default != val && (f.Default != "" || val != ""):
			if d := defaultText(f); d != val {
				source = "derived"
			}
		}
		if f.Secret && val != "" {
			val = mask
		}
		out = append(out, Setting{f.Variable, redactURL(val), source})
	}
	return out
}

// defaultText is the field's default as Effective prints it: 600s is written 10m0s.
func defaultText(f Field) string {
	d := DefaultConfig()
	v := reflect.ValueOf(&d).Elem().Field(f.index).Interface()
	if l, ok := v.([]string); ok {
		return strings.Join(l, ",")
	}
	return fmt.Sprint(v)
}
