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
    ...[
      { sampling: { logit_bias: { 99999: 1 } } }, { sampling: { top_k: 4294967295 } }, { sampling: { n: 17 } },
      { sampling: { top_p: 0 } }, { sampling: { min_p: 2 } }, { sampling: { repetition_penalty: 0 } },
      { sampling: { json_schema: '{' } }, { sampling: { regex: '(' } }, { sampling: { grammar: 'a' } },
      { sampling: { regex: 'a' }, stopping: { ignore_eos: true } }, { stopping: { max_new_tokens: 0 } },
      { stopping: { max_new_tokens: 9, min_new_tokens: 10 } }, { stopping: { stop: [''] } },
      { stopping: { stop: Array(17).fill('a') } }, { stopping: { stop_token_ids: [99999] } },
      { stopping: { max_new_tokens: 100000 } }, { output: { logprobs: 21 } }, { output: { prompt_logprobs: 21 } },
      { request_id: 'a b' }, { cache: { salt: 'a'.repeat(1025) } }, { text: 'a'.repeat(2000) }
    ].map(wrong => ({ text: 'abc', ...wrong, sampling: { seed: 1, ...wrong.sampling } })),
    { tokens: { ids: [99999] } },
    { tokens: { ids: [] } },
    { chat: { messages: [] } },
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
