// A client of `tk serve` for Node, over @grpc/grpc-js.
//
//   npm install
//   node client.js HOST:PORT 'def main('
//
// TK_TOKEN is the caller's token, TK_CA the PEM file of the server's authority; without TK_CA nothing is encrypted.
'use strict'

const fs = require('node:fs')
const path = require('node:path')
const grpc = require('@grpc/grpc-js')
const protoLoader = require('@grpc/proto-loader')
const health = require('grpc-health-check')

const PROTO = path.join(__dirname, '../generation.proto')
const LOADING = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true }
const tk = grpc.loadPackageDefinition(protoLoader.loadSync(PROTO, LOADING)).tk.v1
const details = protoLoader.loadSync(path.join(__dirname, 'error_details.proto'), LOADING)
const HealthClient = grpc.makeGenericClientConstructor(health.service, 'Health')

class Client {
  /** Connects to HOST:PORT; `token` and `ca` (a PEM text) are for a server that wants them. */
  constructor (target, { token, ca } = {}) {
    const credentials = ca ? grpc.credentials.createSsl(Buffer.from(ca)) : grpc.credentials.createInsecure()
    this.generation = new tk.Generation(target, credentials)
    this.health = new HealthClient(target, credentials)
    this.metadata = new grpc.Metadata()
    if (token) this.metadata.set('authorization', `Bearer ${token}`)
  }

  /** Resolves to the description of the served model. */
  modelInfo () {
    return this.#call('GetModelInfo', {})
  }

  /** Resolves to the whole answer to a GenerateRequest; `seconds` is the deadline. */
  generate (request, { seconds } = {}) {
    return this.#call('GenerateOnce', request, seconds)
  }

  /** Yields the events of a GenerateRequest; leaving the loop early ends the request on the server. */
  async * stream (request, { seconds } = {}) {
    const call = this.generation.Generate(request, this.metadata, within(seconds))
    try {
      for await (const event of call) yield event
    } finally {
      call.on('error', () => {}) // the status of a call that we end ourselves is CANCELLED
      call.cancel()
    }
  }

  /** Yields SERVING or NOT_SERVING whenever it changes; '' is liveness, 'tk.v1.Generation' readiness. */
  async * watch (service) {
    const call = this.health.watch({ service })
    try {
      for await (const { status } of call) yield status
    } finally {
      call.on('error', () => {})
      call.cancel()
    }
  }

  close () {
    this.generation.close()
    this.health.close()
  }

  #call (method, request, seconds) {
    return new Promise((resolve, reject) => {
      this.generation[method](request, this.metadata, within(seconds), (error, answer) => {
        if (error) reject(error)
        else resolve(answer)
      })
    })
  }
}

/** The options of a call that may take so many seconds. */
function within (seconds) {
  return seconds ? { deadline: Date.now() + 1000 * seconds } : {}
}

/** The status of a failed call: its code, the fields that are wrong, and the seconds after which to try again. */
function describe (error) {
  const found = { code: grpc.status[error.code], message: error.details, fields: [], retrySeconds: null }
  for (const bytes of error.metadata.get('grpc-status-details-bin')) {
    for (const any of details['tk.example.Status'].deserialize(bytes).details) {
      const kind = any.type_url.split('/google.rpc.')[1]
      const type = details[`tk.example.${kind}`]
      const detail = type && type.deserialize(any.value)
      if (kind === 'BadRequest') found.fields.push(...detail.field_violations.map(({ field }) => field))
      if (kind === 'RetryInfo') found.retrySeconds = Number(detail.retry_delay.seconds) + detail.retry_delay.nanos / 1e9
    }
  }
  return found
}

async function main ([target, prompt]) {
  if (prompt === undefined) {
    console.error("Give the address of a server and a prompt: node client.js HOST:PORT 'def main('")
    process.exitCode = 2
    return
  }
  const ca = process.env.TK_CA && fs.readFileSync(process.env.TK_CA)
  const client = new Client(target, { token: process.env.TK_TOKEN, ca })
  try {
    for await (const { delta } of client.stream({ text: prompt, stopping: { max_new_tokens: 64 } })) {
      if (delta) process.stdout.write(delta.text)
    }
    process.stdout.write('\n')
  } catch (error) {
    const { code, message, retrySeconds } = describe(error)
    console.error(`${code}: ${message}` + (retrySeconds ? ` Try again in ${retrySeconds} s.` : ''))
    process.exitCode = 1
  } finally {
    client.close()
  }
}

module.exports = { Client, describe }
if (require.main === module) main(process.argv.slice(2))
