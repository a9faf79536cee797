// ---------------------------------------------------------------------------
// Beside the text: a token with its probabilities, an expert with its texts

const CONTEXT_TOKENS = 12;
const TEXTS_AT_ONCE = 15;
const LISTED_TOKENS = 12;
const FEWEST_OCCURRENCES = 3;
const SMOOTHING = 20; // as in the tables of the report

/** Describes the token that the reader points at, in every model. */
function renderToken() {
  const place = document.getElementById("token");
  place.classList.toggle("filled", Boolean(state.token));
  if (!state.token) {
    const hint = "Point at a token, or go to it by Tab and arrow keys.";
    place.replaceChildren(make("h3", "Token"), make("p.soft", hint));
    return;
  }
  const { stack, token } = state.token;
  const start = stack.starts[state.example];
  const facts = [
    `id ${content.ids[stack.token[token]]}`,
    `position ${token - start + 1} of ${stack.lengths[state.example]}`,
  ];
  if (stack.target.length) {
    facts.push(`its label: ${content.texts[stack.target[token]].trim()}`);
  }
  const heading = make(
    "h3",
    make("span.soft", "Token "),
    make("code", tokenText(stack, token).trim()),
  );
  place.replaceChildren(heading, make("p.soft", facts.join(" · ")));

  for (const model of models) {
    const layer = model.byStack[stack.name][state.layer[stack.name]];
    if (layer) {
      place.append(describeChoices(model, layer, token));
    }
  }
}

/** Returns what a layer did with a token, and the token's way through all layers. */
function describeChoices(model, layer, token) {
  const title = models.length > 1 ? `${layer.name}, ${model.name}` : layer.name;
  const probs = new Map(bestOf(layer, token));
  const choices = new Map(
    choicesOf(layer, token).map((choice, place) => [choice.expert, { ...choice, place }]),
  );

  // The likeliest experts, then choices that are not among them.
  const experts = [...new Set([...probs.keys(), ...choices.keys()])];
  const rows = experts.map((expert) => {
    const prob = probs.get(expert) ?? null;
    const choice = choices.get(expert);
    const bar = probabilityBar(layer, expert, prob ?? 0);
    const chip = expertChip(layer, expert);
    return [chip, bar, formatPercent(prob), choiceText(choice), weightText(choice)];
  });
  const parts = [make("h4", title)];
  if (rows.length) {
    parts.push(makeTable(["expert", "", "prob.", "choice", "weight"], rows, [2, 4]));
  } else {
    parts.push(make("p", "No expert chose it."));
  }
  if (!layer.numBest) {
    parts.push(make("p.soft", "Probabilities were not recorded."));
  }

  const way = make("p.way", make("span.soft", "by layer "));
  const layers = model.byStack[layer.stack];
  layers.forEach((each) => {
    const chip = expertChip(each, firstChoice(each, token));
    chip.title = each.name;
    chip.classList.toggle("here", each === layer);
    way.append(chip, each === layers[layers.length - 1] ? "" : " → ");
  });
  return make("div.choices", ...parts, layers.length > 1 ? way : null);
}

function probabilityBar(layer, expert, prob) {
  const bar = make(
    "span.bar",
    { "aria-hidden": "true", data: { hue: hueOf(layer, expert) } },
    make("span"),
  );
  bar.firstChild.style.width = `${100 * prob}%`;
  return bar;
}

function choiceText(choice) {
  if (!choice) {
    return make("span.soft", "not asked");
  }
  const names = ["1st", "2nd", "3rd"];
  const name = names[choice.place] ?? `${choice.place + 1}th`;
  return choice.weight === null ? make("strong", `${name}, refused`) : `${name}, accepted`;
}

function weightText(choice) {
  return !choice || choice.weight === null ? "" : formatNumber(choice.weight);
}

// ---------------------------------------------------------------------------
// An expert

/** Describes the chosen expert, and lists its texts. */
function renderExpert() {
  const place = document.getElementById("expert");
  const pane = state.active;
  const layer = pane ? layerOf(pane) : null;
  if (!layer || pane.expert === null) {
    const hint =
      "Choose an expert above the text, or click a token, to see where else it is chosen.";
    place.replaceChildren(make("h3", "Expert"), make("p.soft", hint));
    return;
  }
  const { expert } = pane;
  const found = occurrences(pane.stack, layer, expert);
  const heading = make("h3", expertChip(layer, expert), ` ${layer.name}, expert ${expert + 1}`);
  const name = models.length > 1 ? make("p.soft", pane.model.name) : null;
  place.replaceChildren(heading, ...[name, describeLoad(layer, expert)].filter(Boolean));

  const preferred = preferredTokens(pane.stack, layer, found);
  if (preferred.length) {
    place.append(make("h4", "Tokens that it prefers"), listTokens(preferred));
  }
  place.append(
    make("h4", "Its texts"),
    make("p.soft", { id: "texts-count" }),
    make("ol", { id: "texts" }),
  );
  place.append(make("p", make("button", { type: "button", id: "more-texts" }, "Show more")));
  listTexts(pane, found);
}

function describeLoad(layer, expert) {
  const asked = layer.load[expert];
  const refused = asked - layer.accepted[expert];
  const share = asked / (sum(layer.load) || 1);
  const parts = [
    `${formatPercent(share)} of the load (even: ${formatPercent(1 / layer.num_experts)})`,
  ];
  parts.push(
    `first choice of ${formatCount(layer.first[expert])} of ${plural(layer.num_tokens, "token")}`,
  );
  parts.push(
    refused
      ? `${formatPercent(refused / asked)} of its ${plural(asked, "request")} refused`
      : "no request refused",
  );
  return make("p", `${parts.join("; ")}.`);
}

/** Returns the tokens shown anywhere whose first choice is an expert. */
function occurrences(stack, layer, expert) {
  const found = [];
  const total = stack.starts[stack.starts.length - 1];
  for (let token = 0; token < total; token += 1) {
    if (firstChoice(layer, token) === expert) {
      found.push(token);
    }
  }
  return found;
}

/** Returns the texts of tokens that an expert prefers, by falling lift, smoothed for rare ones. */
function preferredTokens(stack, layer, found) {
  const seen = new Map();
  const chosen = new Map();
  for (const text of stack.token) {
    seen.set(text, (seen.get(text) ?? 0) + 1);
  }
  for (const token of found) {
    const text = stack.token[token];
    chosen.set(text, (chosen.get(text) ?? 0) + 1);
  }

  const share = found.length / stack.token.length;
  const rows = [];
  for (const [text, count] of chosen) {
    const lift = (count / share + SMOOTHING) / (seen.get(text) + SMOOTHING);
    if (count >= FEWEST_OCCURRENCES && lift > 1) {
      rows.push({ text: content.texts[text], count, seen: seen.get(text), lift });
    }
  }
  rows.sort((a, b) => b.lift - a.lift || b.count - a.count);
  return rows.slice(0, LISTED_TOKENS);
}

function listTokens(rows) {
  const items = rows.map((row) => {
    const counts = make("small", ` ${formatCount(row.count)} of ${formatCount(row.seen)}`);
    const title = `${row.count} of its ${row.seen} occurrences in the text shown; lift ${row.lift.toFixed(1)}`;
    return make("li", { title }, make("code", row.text.trim()), counts);
  });
  return make("ul.preferred", ...items);
}

/** Lists texts evenly over all that there are; each further batch lies between the earlier ones. */
function listTexts(pane, found) {
  const list = document.getElementById("texts");
  const button = document.getElementById("more-texts");
  const stride = Math.max(1, Math.ceil(found.length / TEXTS_AT_ONCE));
  let batch = 0;
  let listed = 0;

  const showBatch = () => {
    for (let i = batch; i < found.length; i += stride) {
      list.append(textItem(pane, found[i]));
      listed += 1;
    }
    batch += 1;
    button.hidden = listed >= found.length;
    document.getElementById("texts-count").textContent = found.length
      ? `${formatCount(listed)} of ${plural(found.length, "place")} in the text shown, evenly chosen. Click one to go there.`
      : "No token that is shown has it as its first choice.";
  };
  button.addEventListener("click", showBatch);
  showBatch();
}

/** Returns a token with the words around it, as a button that leads there. */
function textItem(pane, token) {
  const { stack } = pane;
  const example = exampleOf(stack, token);
  const start = Math.max(stack.starts[example], token - CONTEXT_TOKENS);
  const end = Math.min(stack.starts[example + 1], token + CONTEXT_TOKENS + 1);
  let before = start > stack.starts[example] ? "… " : "";
  let after = "";
  for (let i = start; i < token; i += 1) {
    before += tokenText(stack, i);
  }
  for (let i = token + 1; i < end; i += 1) {
    after += tokenText(stack, i);
  }
  after += end < stack.starts[example + 1] ? " …" : "";

  // The space before a word stands outside its mark.
  const text = tokenText(stack, token);
  if (text.startsWith(" ")) {
    before += " ";
  }
  const button = make(
    "button.text",
    { type: "button", dir: "auto", on: { click: () => goTo(pane, example, token) } },
    before,
    make("mark", text.trim()),
    after,
    make("small", ` · example ${example + 1}`),
  );
  return make("li", button);
}

/** Leads to a token: its example, and the focus on it. */
function goTo(pane, example, token) {
  if (example !== state.example || token - pane.first >= pane.spans.length) {
    showExample(example, pane.stack.name, token);
  }
  const span = pane.spans[token - pane.first];
  span.focus({ preventScroll: true });
  span.scrollIntoView({ block: "center", behavior: scrollBehaviour() });
}
