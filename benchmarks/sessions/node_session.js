// What grpc-js under Node asks: node node_session.js HOST:PORT CLIENT.js (examples/clients/node/client.js).
'use strict'

const { Client } = require(process.argv[3])

async function main () {
  const client = new Client(process.argv[2])
  const stopping = { max_new_tokens: 12, ignore_eos: true }
  const requests = [
    { text: 'def main(', sampling: { temperature: 0, seed: 3 }, stopping, output: { logprobs: 2, prompt_logprobs: 1 } },
    { text: 'abc', sampling: { seed: 7, n: 3, top_k: 9 }, stopping: { max_new_tokens: 5, stop: ['a'] }, request_id: 'a' },
    { tokens: { ids: [65, 66] }, sampling: { seed: 7, logit_bias: { 65: 3 } }, stopping, cache: { bypass: true } },
    { chat: { messages: [{ role: 'user', content: 'hi' }] }, sampling: { temperature: 0, seed: 3 }, stopping },
    { text: 'abc', sampling: { seed: 1, regex: '[ab]{3}' } },
    { text: 'abc', sampling: { temperature: -1 } },
    { text: 'abc', model: 'another' },
    { text: 'abc', sampling: { seed: 3 }, stopping, priority: 1 },
    { stopping }
  ]
  await client.modelInfo()
  for (const request of requests) {
    await client.generate(request).catch(() => {})
    try {
      for await (const event of client.stream(request)) void event
    } catch {} // it is in the record
  }
  for await (const status of client.watch('tk.v1.Generation')) if (status) break
  client.close()
}

main()
