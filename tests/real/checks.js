// Everything that a Node client does with a real server, as one JSON document on stdout.
//
// Usage: node checks.js CLIENT.js HOST:PORT PROMPT. It writes the line `draining?` when the server is to be told to end.
// The server computes at most 4 sequences and lets none wait.
'use strict'

const { Client, describe } = require(process.argv[2])
const [, , , target, prompt] = process.argv
const GREEDY = { temperature: 0 }
const FEW = { text: prompt, sampling: GREEDY, stopping: { max_new_tokens: 12, ignore_eos: true } }
const LONG = { text: prompt, sampling: { n: 4 }, stopping: { max_new_tokens: 3000, ignore_eos: true } }

async function failure (promise) {
  try {
    await promise
  } catch (error) {
    return describe(error)
  }
  return null
}

async function collect (events) {
  const seen = []
  for await (const event of events) seen.push(event)
  return seen
}

// The slot of an ended request is free between two steps: a request right behind it may still be refused.
async function generateSoon (client) {
  for (let tries = 0; tries < 200; tries++) {
    const refused = await failure(client.generate(FEW))
    if (!refused) return tries
    if (refused.code !== 'RESOURCE_EXHAUSTED') throw new Error(JSON.stringify(refused))
    await new Promise(resolve => setTimeout(resolve, 10))
  }
  throw new Error('an ended request holds its place')
}

async function main () {
  const client = new Client(target)
  const found = { info: await client.modelInfo(), once: await client.generate(FEW) }
  found.events = await collect(client.stream(FEW))

  found.badField = await failure(client.generate({ ...FEW, sampling: { temperature: -1 } }))
  found.badModel = await failure(client.generate({ ...FEW, model: 'another' }))
  found.deadline = await failure(collect(client.stream(LONG, { seconds: 0.1 })))
  await generateSoon(client)

  for await (const event of client.stream(LONG)) {
    if (event.event !== 'delta') continue
    found.full = await failure(client.generate(FEW))
    break // ends the request
  }
  await generateSoon(client)

  const readiness = client.watch('tk.v1.Generation')
  found.health = [(await readiness.next()).value]
  const last = client.stream(LONG)
  await last.next()
  console.log('draining?')
  found.health.push((await readiness.next()).value)
  found.draining = await failure(client.generate(FEW))
  const rest = await collect(last)
  found.finishedWhileDraining = rest.filter(({ event }) => event === 'finished').length
  console.log(JSON.stringify(found))
  client.close()
}

main().catch(error => {
  console.error(error)
  process.exit(1)
})
