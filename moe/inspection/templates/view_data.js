"use strict";

// ---------------------------------------------------------------------------
// The numbers of the page, as Python wrote them

const content = JSON.parse(document.getElementById("data").textContent);
const SVG = document.getElementById("shapes").namespaceURI;
const NUM_HUES = 8;
const LARGEST_BYTE = 255;

const STACK_TITLES = {
  encoder: "Encoder: the text that it reads",
  decoder: "Decoder: the text that it is given",
};

/** Returns integers that were packed into base64, little-endian. */
function unpack(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) {
    bytes[i] = text.charCodeAt(i);
  }
  if (packed.size === 1) {
    return bytes;
  }
  return packed.size === 2 ? new Uint16Array(bytes.buffer) : new Uint32Array(bytes.buffer);
}

function openStack(stack) {
  return {
    name: stack.stack,
    token: unpack(stack.token),
    target: unpack(stack.target),
    starts: stack.starts,
    lengths: stack.lengths,
  };
}

/** Returns a layer: its totals, and what it did with each token that is shown. */
function openLayer(totals, tokens, matches) {
  const numChoices = unpack(tokens.num_choices);
  const offsets = new Uint32Array(numChoices.length + 1);
  for (let token = 0; token < numChoices.length; token += 1) {
    offsets[token + 1] = offsets[token] + numChoices[token];
  }

  return {
    ...totals,
    name: `${totals.stack} ${totals.layer + 1}`,
    matches,
    offsets,
    expert: unpack(tokens.expert),
    weight: unpack(tokens.weight),
    largestWeight: tokens.largest_weight,
    numBest: tokens.num_best,
    bestExpert: unpack(tokens.best_expert),
    bestProb: unpack(tokens.best_prob),
  };
}

function openModel(model, number) {
  const layers = model.layers.map((totals, i) =>
    openLayer(totals, model.tokens[i], model.matches[i]),
  );
  return {
    number,
    name: model.name,
    layers,
    flows: model.flows,
    byStack: {
      encoder: layers.filter((layer) => layer.stack === "encoder"),
      decoder: layers.filter((layer) => layer.stack === "decoder"),
    },
  };
}

const models = content.models.map(openModel);
const stacks = Object.fromEntries(content.stacks.map((stack) => [stack.stack, openStack(stack)]));

/** Returns the expert of a token's first choice; -1 for none. */
function firstChoice(layer, token) {
  const start = layer.offsets[token];
  return start === layer.offsets[token + 1] ? -1 : layer.expert[start];
}

/** Returns the choices of a token, the first one first; a weight is null where it was refused. */
function choicesOf(layer, token) {
  const choices = [];
  for (let i = layer.offsets[token]; i < layer.offsets[token + 1]; i += 1) {
    const stored = layer.weight[i];
    const weight = stored ? ((stored - 1) / (LARGEST_BYTE - 1)) * layer.largestWeight : null;
    choices.push({ expert: layer.expert[i], weight });
  }
  return choices;
}

/** Returns whether the first choice of a token, and whether any of its choices, was accepted. */
function acceptance(layer, token) {
  const start = layer.offsets[token];
  const end = layer.offsets[token + 1];
  let isAny = false;
  for (let i = start; i < end; i += 1) {
    isAny = isAny || layer.weight[i] > 0;
  }
  return { first: start < end && layer.weight[start] > 0, any: isAny };
}

/** Returns the experts of highest probability, as [expert, probability]. */
function bestOf(layer, token) {
  const best = [];
  for (let i = token * layer.numBest; i < (token + 1) * layer.numBest; i += 1) {
    best.push([layer.bestExpert[i], layer.bestProb[i] / LARGEST_BYTE]);
  }
  return best;
}

/** Returns the number of an expert in the first model, where experts were matched; -1 for none. */
function inFirstModel(layer, expert) {
  return expert >= 0 && layer.matches.length ? layer.matches[expert] : expert;
}

/** Returns the colour of an expert, that of its match in the first model; "none" without one. */
function hueOf(layer, expert) {
  const number = inFirstModel(layer, expert);
  return number < 0 ? "none" : String(number % NUM_HUES);
}

function tokenText(stack, token) {
  return content.texts[stack.token[token]];
}

/** Returns the number of the example, among those shown, that a token stands in. */
function exampleOf(stack, token) {
  let low = 0;
  let high = stack.starts.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (stack.starts[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// ---------------------------------------------------------------------------
// Elements and numbers; texts only ever become text nodes

/** Returns an element: fill(create, "p.soft", [{ title: "more" }, "text"]); attributes may be left out. */
function fill(create, name, parts) {
  const [tag, ...classes] = name.split(".");
  const element = create(tag);
  if (classes.length) {
    element.setAttribute("class", classes.join(" "));
  }
  const [attributes, ...children] = parts[0]?.constructor === Object ? parts : [{}, ...parts];
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") {
      Object.entries(value).forEach((pair) => element.addEventListener(...pair));
    } else if (key === "data") {
      Object.assign(element.dataset, value);
    } else if (value !== null && value !== false) {
      element.setAttribute(key, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function make(name, ...parts) {
  return fill((tag) => document.createElement(tag), name, parts);
}

function draw(name, ...parts) {
  return fill((tag) => document.createElementNS(SVG, tag), name, parts);
}

function formatCount(count) {
  return count.toLocaleString("en-US");
}

function formatPercent(share) {
  if (share === null || Number.isNaN(share)) {
    return "–";
  }
  const percent = 100 * share;
  if (percent > 0 && percent < 0.95) {
    return percent < 0.1 ? "<0.1 %" : `${percent.toFixed(1)} %`;
  }
  return `${percent.toFixed(percent < 9.95 && percent > 0 ? 1 : 0)} %`;
}

function formatNumber(value, digits = 2) {
  return value === null ? "–" : value.toFixed(digits).replace("-", "−");
}

/** Returns e.g. "1 token" or "7 tokens". */
function plural(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** Returns a number in the colour of its expert. */
function expertChip(layer, expert) {
  return make(
    "span.chip",
    { data: { hue: hueOf(layer, expert) } },
    expert < 0 ? "–" : String(expert + 1),
  );
}

/** Returns a box in which an element that is too wide scrolls, by keyboard too. */
function scrollable(label, element) {
  return make("div.scroll", { tabindex: "0", role: "group", "aria-label": label }, element);
}

/** Returns a table; cells are texts or elements, and numbers stand on the right. */
function makeTable(header, rows, numbers = []) {
  const kind = (column) => (numbers.includes(column) ? "number" : null);
  const head = header.map((cell, column) =>
    make("th", { scope: "col", class: kind(column) }, cell),
  );
  const body = rows.map((row) =>
    make("tr", ...row.map((cell, column) => make("td", { class: kind(column) }, cell))),
  );
  const table = make("table", make("thead", make("tr", ...head)), make("tbody", ...body));
  return scrollable("Table", table);
}
