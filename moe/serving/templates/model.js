"use strict";

/** Returns the tensors of a safetensors file by name: {shape, data}, in float32. */
function readTensors(file) {
  const view = new DataView(file.buffer, file.byteOffset);
  const start = 8 + Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(file.subarray(8, start)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const buffer = file.slice(start + from, start + to).buffer; // a copy is aligned
    tensors[name] = { shape, data: readNumbers(dtype, buffer) };
  }

  // A weight in 8 bits is its codes [.., O, I] and a scale [.., O, 1].
  for (const name of Object.keys(tensors).filter((name) => name.endsWith("_q"))) {
    const { shape, data: codes } = tensors[name];
    const scales = tensors[`${name.slice(0, -2)}_scale`].data;
    const width = shape.at(-1);
    tensors[name.slice(0, -2)] = { shape, data: codes.map((code, at) => code * scales[Math.floor(at / width)]) };
    delete tensors[name];
  }
  return tensors;
}

function readNumbers(dtype, buffer) {
  switch (dtype) {
    case "F32":
      return new Float32Array(buffer);
    case "I8":
      return Float32Array.from(new Int8Array(buffer));
    case "BF16": // the upper half of a float32
      return new Float32Array(Uint32Array.from(new Uint16Array(buffer), (half) => half << 16).buffer);
    case "F16":
      return Float32Array.from(new Uint16Array(buffer), halfToFloat);
    default:
      throw new Error(`A tensor has the type ${dtype}; expected F32, F16, BF16 or I8.`);
  }
}

function halfToFloat(half) {
  const sign = half >> 15 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : (sign * fraction) / 2 ** 24;
}

/** Returns W x [O] for a matrix [O, I]. Sums are float64, results float32. */
function product(matrix, x) {
  const width = x.length;
  const y = new Float32Array(matrix.length / width);
  for (let row = 0, at = 0; row < y.length; row++) {
    let sum = 0;
    for (let column = 0; column < width; column++, at++) sum += matrix[at] * x[column];
    y[row] = sum;
  }
  return y;
}

function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b));
  const powers = scores.map((score) => Math.exp(score - largest));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / total);
}

function argmax(numbers) {
  let best = 0;
  for (let at = 1; at < numbers.length; at++) if (numbers[at] > numbers[best]) best = at;
  return best;
}

const ACTIVATIONS = {
  gelu_pytorch_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x / (1 + Math.exp(-x)),
  relu: (x) => Math.max(x, 0),
};

/** The model: tokens in, logits and routes out. A sequence is a list of vectors, one for each token. */
class Model {
  constructor(settings, tensors) {
    this.settings = settings;
    this.tensors = tensors;
    this.width = this.weight("model.encoder.embed_tokens").length;
    this.width /= tensors["model.encoder.embed_tokens.weight"].shape[0];
    this.stacks = { encoder: "model.encoder.stack", decoder: "model.decoder" };
  }

  weight(name) {
    return (this.tensors[`${name}.weight`] ?? this.tensors[name]).data;
  }

  embed(id) {
    return this.weight("model.encoder.embed_tokens").slice(id * this.width, (id + 1) * this.width);
  }

  norm(name, x) {
    const scale = this.weight(name);
    let squares = 0;
    for (const number of x) squares += number * number;
    const factor = 1 / Math.sqrt(squares / x.length + this.settings.epsilon);
    return x.map((number, at) => number * factor * scale[at]);
  }

  /** Returns one query's sum of the values, weighted by its scores. `bias` gets a head and a key. */
  attend(query, keys, values, bias) {
    const result = new Float32Array(query.length);
    const width = query.length / this.settings.num_heads;
    for (let head = 0; head < this.settings.num_heads; head++) {
      const [from, to] = [head * width, (head + 1) * width];
      const scores = Float32Array.from(keys, (key, position) => {
        let score = 0;
        for (let at = from; at < to; at++) score += query[at] * key[at];
        return score + bias(head, position);
      });
      softmax(scores).forEach((weight, position) => {
        for (let at = from; at < to; at++) result[at] += weight * values[position][at];
      });
    }
    return result;
  }

  /** Returns the bias of a head for the distance between two positions. */
  positionBias(stack, block, query) {
    const { buckets } = this.settings[stack];
    const own = this.tensors[`${block}.position_bias.table`]; // else the stack has one table
    const table = own?.data ?? this.weight(`${this.stacks[stack]}.position_bias.table`);
    const longest = (buckets.length - 1) / 2;
    return (head, key) => {
      const distance = Math.max(-longest, Math.min(longest, key - query));
      return table[buckets[longest + distance] * this.settings.num_heads + head];
    };
  }

  feedForward(up, down, x) {
    const hidden = product(up, x);
    const activate = ACTIVATIONS[this.settings.activation];
    if (!this.settings.gated) return product(down, hidden.map(activate));
    const half = hidden.length / 2;
    return product(down, hidden.subarray(0, half).map((gate, at) => activate(gate) * hidden[half + at]));
  }

  /** Returns the experts of a token with their weights, the best first. */
  route(gate, x, { num_selected, policy, threshold, normalize }) {
    const probs = softmax(product(gate, x));
    const experts = [];
    const left = probs.slice();
    while (experts.length < num_selected) {
      const expert = argmax(left);
      experts.push({ expert, weight: probs[expert] });
      left[expert] = -1;
    }
    if (normalize && num_selected > 1) {
      const total = experts.reduce((sum, { weight }) => sum + weight, 1e-9);
      for (const choice of experts) choice.weight = Math.fround(choice.weight / total);
    }
    return experts.filter(
      ({ weight }, at) => at === 0 || policy === "all" || (policy === "threshold" && weight > Math.fround(threshold)),
    );
  }

  sparse(name, x, router) {
    const experts = this.route(this.weight(`${name}.router.gate`), x, router);
    const y = new Float32Array(x.length);
    const count = this.weight(`${name}.router.gate`).length / x.length;
    const part = (weights, expert) => {
      const size = weights.length / count;
      return weights.subarray(expert * size, (expert + 1) * size);
    };
    const up = this.weight(`${name}.experts.${this.settings.gated ? "gate_up_proj" : "up_proj"}`);
    const down = this.weight(`${name}.experts.down_proj`);
    for (const { expert, weight } of experts) {
      const output = this.feedForward(part(up, expert), part(down, expert), x);
      output.forEach((number, at) => (y[at] += weight * number));
    }
    return { y, experts };
  }

  /**
   * Returns the hidden states of new tokens after a stack, and their routes, [{layer, experts}] each.
   * `cache` holds keys and values by layer and is extended; `memory` is the encoder's output.
   */
  run(stack, ids, cache, memory) {
    const past = cache.length;
    let sequence = ids.map((id) => this.embed(id));
    const routes = ids.map(() => []);
    cache.length += ids.length;
    for (let layer = 0; layer < this.settings[stack].num_layers; layer++) {
      const name = `${this.stacks[stack]}.blocks.${layer}`;
      const add = (norm, compute) => {
        const inputs = sequence.map((x) => this.norm(`${name}.${norm}`, x));
        const outputs = compute(inputs);
        sequence = sequence.map((x, at) => x.map((number, column) => number + outputs[at][column]));
      };
      const attention = (kind, inputs, source, biasOf) => {
        const project = (projection, x) => product(this.weight(`${name}.${kind}.${projection}`), x);
        const known = (cache[`${layer}.${kind}`] ??= { keys: [], values: [] });
        for (const x of source) {
          known.keys.push(project("k_proj", x));
          known.values.push(project("v_proj", x));
        }
        return inputs.map((x, at) =>
          project("o_proj", this.attend(project("q_proj", x), known.keys, known.values, biasOf(at))),
        );
      };

      add("self_attention_norm", (inputs) =>
        attention("self_attention", inputs, inputs, (at) => this.positionBias(stack, name, past + at)),
      );
      if (memory) {
        const source = past ? [] : memory; // its keys do not change
        add("cross_attention_norm", (inputs) => attention("cross_attention", inputs, source, () => () => 0));
      }
      if (`${name}.sparse_norm.weight` in this.tensors) {
        add("sparse_norm", (inputs) =>
          inputs.map((x, at) => {
            const { y, experts } = this.sparse(`${name}.sparse_feed_forward`, x, this.settings[stack].router);
            routes[at].push({ layer, experts });
            return y;
          }),
        );
      }
      if (`${name}.feed_forward_norm.weight` in this.tensors) {
        const [up, down] = ["up_proj", "down_proj"].map((part) => this.weight(`${name}.feed_forward.${part}`));
        add("feed_forward_norm", (inputs) => inputs.map((x) => this.feedForward(up, down, x)));
      }
    }
    return { hidden: sequence.map((x) => this.norm(`${this.stacks[stack]}.final_norm`, x)), routes };
  }

  /** Returns the logits of the vocabulary. */
  logits(hidden) {
    const scaled = hidden.map((number) => number * this.settings.output_scale);
    return product(this.weight(this.settings.tied ? "model.encoder.embed_tokens" : "lm_head"), scaled);
  }

  /** Yields the routes of the inputs, then each token of the greedy answer with the routes that led to it. */
  *generate(ids, { start, ends, most_new_tokens }) {
    const { hidden: memory, routes } = this.run("encoder", ids, { length: 0 }, null);
    yield routes;
    const cache = { length: 0 };
    let token = start;
    for (let step = 0; step < most_new_tokens; step++) {
      const output = this.run("decoder", [token], cache, memory);
      token = argmax(this.logits(output.hidden[0]));
      yield { token, routes: output.routes[0] };
      if (ends.includes(token)) return;
    }
  }
}
