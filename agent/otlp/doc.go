// Package otlp sends traces to an OpenTelemetry collector, by OTLP over HTTP in protobuf, configured by the standard OTEL_*
// variables. The messages are OpenTelemetry's own generated types; queue and sender are here, because the SDK and its
// exporter come with gRPC and its gateway: 3.1 MB of program and as much memory in an agent that idles at 17 MB.
//
// Exporter.Export may be called from any goroutine and never blocks; Run, in one, sends.
package otlp
