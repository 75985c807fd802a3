// Chats through the official openai package for Node: the same job on stdin and the same results on stdout as openai_client.py.
// To be started in the folder that has node_modules.
import dns from 'node:dns'
import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'

const require = createRequire(process.cwd() + '/')
const { default: OpenAI } = require('openai')

const lines = createInterface({ input: process.stdin })
const job = JSON.parse((await lines[Symbol.asyncIterator]().next()).value)

const lookup = dns.lookup
dns.lookup = (host, options, callback) => {
  const addresses = job.resolve?.[host]
  if (!addresses) return lookup(host, options, callback)
  if (typeof options === 'function') [callback, options] = [options, {}]
  const found = addresses.map((address) => ({ address, family: 4, by: Math.random() })).sort((a, b) => a.by - b.by)
  process.nextTick(() => (options.all ? callback(null, found) : callback(null, found[0].address, 4)))
}

let next = 0
let over = false

async function chat(clients, n) {
  const base = job.bases[n % job.bases.length]
  const stream = job.streams[Math.floor(n / job.bases.length) % job.streams.length]
  const [low, high] = job.max_tokens
  const result = { n, base, stream, content: '', finish: null, error: null, opened: false, first_ms: null }
  const request = {
    model: job.model,
    messages: [{ role: 'user', content: `Node, request ${n}: count to ten.` }],
    max_tokens: low + (n % (high - low + 1)),
  }
  const start = performance.now()
  try {
    if (stream) {
      const chunks = await clients[base].chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } })
      result.opened = true // the head is here: from now on the package repeats nothing
      for await (const chunk of chunks) {
        for (const choice of chunk.choices) {
          if (choice.delta.content) {
            result.first_ms ??= performance.now() - start
            result.content += choice.delta.content
          }
          result.finish = choice.finish_reason ?? result.finish
        }
      }
    } else {
      const answer = await clients[base].chat.completions.create(request)
      result.content = answer.choices[0].message.content ?? ''
      result.finish = answer.choices[0].finish_reason
    }
  } catch (e) { // whatever is thrown is the finding
    result.error = `${e.constructor.name}: ${e.message} ${e.cause ?? ''}`.trim()
  }
  result.total_ms = performance.now() - start
  console.log(JSON.stringify(result))
}

async function work() {
  const clients = Object.fromEntries(
    job.bases.map((base) => [base, new OpenAI({ baseURL: base + '/v1', apiKey: 'none', maxRetries: job.max_retries, timeout: 120_000 })]),
  )
  while (!over) {
    const n = next++
    if (job.count && n >= job.count) return
    await chat(clients, n)
  }
}

if (!job.count) process.stdin.on('end', () => (over = true)).resume()
await Promise.all(Array.from({ length: job.concurrency }, work))
process.exit(0)
