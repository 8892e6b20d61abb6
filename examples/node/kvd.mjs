// A client of kvd in JavaScript, from docs/protocol.md and a msgpack package alone (npm install @msgpack/msgpack).
import { createConnection } from "node:net";
import { homedir } from "node:os";
import { join } from "node:path";
import { Decoder, encode } from "@msgpack/msgpack";

const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

export class KvdError extends Error {
  constructor({ code, name, message, data, retry_after_s }) {
    super(message);
    Object.assign(this, { code, name, data: data ?? {}, retryAfterS: retry_after_s ?? null });
  }
}

export function defaultSocket(env = process.env) {
  if (env.KVD_SOCKET) return env.KVD_SOCKET;
  const base = process.platform === "darwin" ? join(homedir(), "Library/Application Support")
    : env.XDG_DATA_HOME?.startsWith("/") ? env.XDG_DATA_HOME : join(homedir(), ".local/share");
  return join(env.KVD_DATA_DIR || join(base, "kvd"), "kvd.sock");
}

export class Client {
  #socket; #calls = new Map(); #nextId = 1; #lastWords = null; #buffer = Buffer.alloc(0);

  static connect(path = defaultSocket()) {
    return new Promise((resolve, reject) => {
      const socket = createConnection(path, () => resolve(new Client(socket)));
      socket.once("error", reject);
    });
  }

  constructor(socket) {
    this.#socket = socket;
    socket.removeAllListeners("error");
    socket.on("data", (bytes) => this.#take(bytes));
    socket.on("error", (error) => this.#end(error));
    socket.on("close", () => this.#end(new Error("the daemon closed the connection")));
  }

  // Resolves with the result; onEvent hears the stream; aborting the signal cancels the call at its next step.
  call(method, params = {}, { onEvent = () => {}, signal } = {}) {
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      if (this.#socket.destroyed) return reject(this.#lastWords ?? new Error("not connected"));
      const cancel = () => this.#send([2, "cancel", [id]]);
      const done = (settle) => (value) => { signal?.removeEventListener("abort", cancel); settle(value); };
      this.#calls.set(id, { resolve: done(resolve), reject: done(reject), onEvent });
      this.#send([0, id, method, [params]]);
      if (signal?.aborted) cancel();
      signal?.addEventListener("abort", cancel);
    });
  }

  close() { this.#socket.destroy(); }

  #send(message) { this.#socket.write(encode(message)); }

  // Messages follow each other without separators: decode whole ones, keep the rest for the next bytes.
  #take(bytes) {
    this.#buffer = Buffer.concat([this.#buffer, bytes]);
    while (this.#buffer.length > 0) {
      const length = messageLength(this.#buffer);
      if (length === null) break;
      const message = new Decoder().decode(this.#buffer.subarray(0, length));
      this.#buffer = this.#buffer.subarray(length);
      this.#handle(message);
    }
    if (this.#buffer.length > MAX_MESSAGE_BYTES) this.#socket.destroy(new Error("a message of the daemon is too long"));
  }

  #handle([type, ...rest]) {
    if (type === 1) {
      const [id, error, result] = rest;
      const call = this.#calls.get(id);
      this.#calls.delete(id);
      if (call) error === null ? call.resolve(result) : call.reject(new KvdError(error));
    } else if (type === 2 && rest[0] === "stream") {
      const [id, event] = rest[1];
      this.#calls.get(id)?.onEvent(event);
    } else if (type === 2 && rest[0] === "error") {
      this.#lastWords = new KvdError(rest[1][0]);
    }
  }

  #end(error) {
    for (const call of this.#calls.values()) call.reject(this.#lastWords ?? error);
    this.#calls.clear();
  }
}

// Bytes of the first whole msgpack value in a buffer, or null when it has not all come.
function messageLength(buffer) {
  let at = 0, values = 1;
  const has = (count) => at + count <= buffer.length;
  while (values > 0) {
    if (!has(1)) return null;
    const first = buffer[at++];
    values -= 1;
    let skip = 0;
    if (first <= 0x7f || first >= 0xe0 || (first >= 0xc0 && first <= 0xc3)) continue;
    if (first <= 0x8f) values += 2 * (first & 0x0f);
    else if (first <= 0x9f) values += first & 0x0f;
    else if (first <= 0xbf) skip = first & 0x1f;
    else {
      const number = { 0xca: 4, 0xcb: 8, 0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8, 0xd0: 1, 0xd1: 2, 0xd2: 4, 0xd3: 8 }[first];
      const lengthBytes = { 0xc4: 1, 0xc5: 2, 0xc6: 4, 0xd9: 1, 0xda: 2, 0xdb: 4, 0xdc: 2, 0xdd: 4, 0xde: 2, 0xdf: 4 }[first];
      if (number) skip = number;
      else if (lengthBytes) {
        if (!has(lengthBytes)) return null;
        const length = buffer.readUIntBE(at, lengthBytes);
        at += lengthBytes;
        if (first >= 0xde) values += 2 * length;
        else if (first >= 0xdc) values += length;
        else skip = length;
      } else throw new Error(`the daemon sent an extension type (${first}), which the protocol has not`);
    }
    if (!has(skip)) return null;
    at += skip;
  }
  return at;
}
