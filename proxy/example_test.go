package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"time"

	"github.com/grapevine-lb/grapevine/proxy"
	"github.com/grapevine-lb/grapevine/routing"
)

// A proxy in front of one engine. With more members in the table, requests would also go to their agents.
func Example() {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"hello"},"finish_reason":"stop"}]}`)
	}))
	defer engine.Close()
	target, _ := url.Parse(engine.URL)
	policy, _ := routing.NewPolicy("local")
	table := routing.NewTable(routing.Member{Boot: 1, Node: "only"})
	table.SetModels(1, []routing.Model{{ID: "m"}}, 0, time.Now())
	table.Update(routing.Report{Boot: 1, Seq: 1, State: routing.StateReady}, time.Now())

	p, err := proxy.New(proxy.Config{
		Table:     table,
		Policy:    policy,
		EngineURL: target,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	front := httptest.NewServer(p.ClientHandler())
	defer front.Close()

	resp, err := http.Post(front.URL+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","messages":[]}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, string(body))
	fmt.Println("given to the engine:", p.Load().Accepted)
	// Output:
	// 200 {"choices":[{"message":{"content":"hello"},"finish_reason":"stop"}]}
	// given to the engine: 1
}
