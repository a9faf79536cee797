"use strict";

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const codes = Object.keys(data.languages);
const tokenizer = new Tokenizer(data.tokenizer);
const model = new Model(
  data.model,
  readTensors(Uint8Array.from(atob(at("weights").textContent), (letter) => letter.charCodeAt(0))),
);
let run = 0; // a new run ends the one before

function make(tag, parent, text = "", name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = name;
  parent.append(element);
  return element;
}

function nameOf(code) {
  return data.languages[code] ?? code;
}

function percent(share) {
  return `${Math.round(100 * share)}\u00a0%`;
}

// ---------------------------------------------------------------------------
// What the user asks

/** Returns the least number of letters to change, add or remove. */
function editDistance(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, column) => column);
  for (let line = 1; line <= a.length; line++) {
    const next = [line];
    for (let column = 1; column <= b.length; column++) {
      const changed = row[column - 1] + (a[line - 1] === b[column - 1] ? 0 : 1);
      next.push(Math.min(changed, row[column] + 1, next[column - 1] + 1));
    }
    row = next;
  }
  return row[b.length];
}

/** Returns the code of a language by its code or English name, in any case. */
function findLanguage(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) throw new Error("No language is chosen. Choose one of the list.");
  const labels = codes.flatMap((code) => [[code, code], [nameOf(code), code]]);
  const match = labels.find(([label]) => label.toLowerCase() === wanted);
  if (match) return match[1];

  const distances = labels.map(([label]) => editDistance(label.toLowerCase(), wanted));
  const [label, code] = labels[distances.indexOf(Math.min(...distances))];
  const nearest = label === code ? `${code} (${nameOf(code)})` : label;
  throw new Error(`There is no language “${text.trim()}”. Did you mean ${nearest}?`);
}

/** Returns the tokens of the model's input; throws an error that says what is wrong. */
function readInput() {
  let text = at("text").value.trim();
  if (codes.length) {
    const tagged = /^([\p{L}_-]+)\s*:(.*)$/su.exec(text);
    const code = findLanguage(tagged ? tagged[1] : at("language").value || at("language").placeholder);
    at("language").value = nameOf(code);
    if (tagged) text = at("text").value = tagged[2].trim();
    if (!text) throw new Error("The name is empty. Type one, for example “New Zealand”.");
    text = `${code}: ${text}`;
  } else if (!text) {
    throw new Error("The text is empty. Type one.");
  }
  const ids = tokenizer.encode(text);
  if (ids.length > data.longest) {
    throw new Error(`The text is too long: it has ${ids.length} tokens; expected at most ${data.longest}.`);
  }
  return ids;
}

// ---------------------------------------------------------------------------
// What the model answers

function colour(expert) {
  return `oklch(var(--light) 0.09 ${Math.round((expert * 137.5) % 360)})`; // neighbours differ
}

/** Colours a token by its experts in the last sparse layer, each as wide as its weight. */
function paint(element, routes) {
  if (!routes.length) return;
  let end = 0;
  const { experts } = routes.at(-1);
  const total = experts.reduce((sum, { weight }) => sum + weight, 0);
  const stops = experts.map(({ expert, weight }) => {
    const from = end;
    end += (100 * weight) / total;
    return `${colour(expert)} ${from}% ${end}%`;
  });
  element.style.setProperty("--mix", `linear-gradient(90deg, ${stops})`);
}

/** Shows a token in the list of a stack: its text or bytes, its experts and their languages. */
function showToken(stack, id, piece, routes) {
  const item = make("li", at(stack));
  const special = data.ends.includes(id) ? "end" : data.tokenizer.tokens[id];
  const name = tokenizer.special.has(id) ? special : piece.trim() ? piece.replace(/^ /, "␣") : null;
  const bytes = Array.from(tokenizer.bytes(id), (byte) => byte.toString(16).padStart(2, "0"));
  const chip = make("span", item, name ?? (bytes.join(" ") || id), name ? "token" : "token bytes");
  if (!name) chip.title = "Bytes of a letter that the next tokens complete";
  paint(chip, routes);
  const lines = make("div", item);
  for (const { layer, experts } of routes) {
    for (const { expert, weight } of experts) {
      const line = make("p", lines, "", "route");
      make("span", line, "", "swatch").style.setProperty("--colour", colour(expert));
      make("span", line, routes.length > 1 ? `${layer + 1}.${expert + 1}` : `Expert ${expert + 1}`);
      make("span", line, percent(weight), "weight");
      const languages = data.experts[stack]?.[layer]?.[expert] ?? [];
      const shares = languages.map(([code, share]) => `${nameOf(code)} ${percent(share)}`);
      make("span", line, shares.join(", "), "languages soft");
    }
  }
}

async function answer() {
  const current = ++run;
  for (const id of ["problem", "answer", "speed", "encoder", "decoder"]) at(id).replaceChildren();
  at("details").hidden = true;
  let ids;
  try {
    ids = readInput();
  } catch (error) {
    at("problem").textContent = error.message;
    return;
  }

  let milliseconds = 0;
  const written = [];
  const steps = model.generate(ids, data);
  for (let isFirst = true; ; isFirst = false) {
    const started = performance.now();
    const { value, done } = steps.next();
    milliseconds += performance.now() - started;
    if (done) break;
    if (isFirst) {
      const pieces = tokenizer.pieces(ids);
      ids.forEach((id, position) => showToken("encoder", id, pieces[position], value[position]));
      at("details").hidden = !value.some((routes) => routes.length);
      continue;
    }
    written.push(value.token);
    const piece = tokenizer.pieces(written).at(-2);
    showToken("decoder", value.token, piece, value.routes);
    paint(make("span", at("answer"), piece, "token"), value.routes);
    await new Promise((resume) => setTimeout(resume)); // the browser draws
    if (current !== run) return;
  }
  at("answer").append(tokenizer.pieces(written).at(-1));
  const perSecond = Math.round((1000 * written.length) / milliseconds);
  at("speed").textContent = `${written.length} tokens in ${Math.round(milliseconds)} ms: ${perSecond} a second`;
}

// ---------------------------------------------------------------------------
// The form

for (const code of codes) make("option", at("languages"), code).value = nameOf(code);
at("language-field").hidden = !codes.length;
at("text-label").textContent = codes.length ? "Name in English" : "Text";
at("examples").hidden = !data.examples.length;
for (const [code, text] of data.examples) {
  make("button", at("examples"), `${text} in ${nameOf(code)}`).addEventListener("click", () => {
    at("language").value = nameOf(code);
    at("text").value = text;
    answer();
  });
}
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  answer();
});

// The list shows every language only while the field is empty.
at("language").addEventListener("focus", ({ target }) => {
  target.placeholder = target.value;
  target.value = "";
});
at("language").addEventListener("blur", ({ target }) => {
  target.value ||= target.placeholder;
  target.placeholder = "";
});
at("examples").querySelector("button")?.click();
