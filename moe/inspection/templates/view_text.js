// ---------------------------------------------------------------------------
// The text, coloured by expert

const MANY_EXPERTS = NUM_HUES;
const TOKENS_AT_ONCE = 2000;
const BUSIEST_BUTTONS = 32;

/** What the reader has chosen. A pane is one model's part of a stack. */
const state = {
  example: 0,
  layer: { encoder: 0, decoder: 0 },
  limit: { encoder: TOKENS_AT_ONCE, decoder: TOKENS_AT_ONCE },
  colours: "all",
  active: null,
  token: null,
};

const panes = [];

/** Returns the layer that a pane shows; undefined where its model has none of that number. */
function layerOf(pane) {
  return pane.model.byStack[pane.stack.name][state.layer[pane.stack.name]];
}

function numLayers(stackName) {
  return Math.max(...models.map((model) => model.byStack[stackName].length));
}

function panesOf(stackName) {
  return panes.filter((pane) => pane.stack.name === stackName);
}

function busiest(layer) {
  return layer.load.indexOf(Math.max(...layer.load));
}

/** Builds slider, experts and text of both stacks. */
function buildStacks() {
  const place = document.getElementById("stacks");
  for (const stack of Object.values(stacks)) {
    if (!stack.starts[stack.starts.length - 1]) {
      continue;
    }
    const columns = make("div", { class: models.length > 1 ? "columns two" : "columns" });
    for (const model of models) {
      const pane = buildPane(stack, model);
      panes.push(pane);
      columns.append(pane.element);
    }
    const heading = make("h3", STACK_TITLES[stack.name]);
    place.append(
      make(
        "section.stack",
        { id: `stack-${stack.name}` },
        heading,
        buildSlider(stack.name),
        columns,
      ),
    );
  }
}

function buildSlider(stackName) {
  const number = numLayers(stackName);
  if (number === 0) {
    return make("p.soft", `The ${stackName} has no sparse layer, so its tokens have no expert.`);
  }
  const input = make("input", {
    type: "range",
    id: `layer-${stackName}`,
    min: 1,
    max: number,
    step: 1,
    value: 1,
    on: { input: () => showLayer(stackName, Number(input.value) - 1) },
  });
  const output = make("output", { for: input.id, id: `layer-${stackName}-name` });
  return make("div.slider", make("label", { for: input.id }, "Sparse layer"), input, output);
}

function buildPane(stack, model) {
  const pane = { stack, model, expert: null, spans: [], first: 0 };
  const name = models.length > 1 ? `${stack.name}, ${model.name}` : stack.name;
  pane.legend = make("div.experts", { role: "toolbar", "aria-label": `Experts of the ${name}` });
  pane.text = make("div.tokens", {
    role: "group",
    "aria-label": `Tokens of the ${name}`,
    "aria-describedby": "token",
    dir: "auto",
    on: {
      mouseover: (event) => onToken(event, pane, false),
      focusin: (event) => onToken(event, pane, true),
      click: (event) => chooseAt(event, pane),
      keydown: (event) => onTextKey(event, pane),
    },
  });
  pane.more = make("p.more");
  const title = models.length > 1 ? make("h4", model.name) : null;
  pane.element = make("div.pane", title, pane.legend, pane.text, pane.more);
  return pane;
}

/** Builds the buttons of the experts of the layer that a pane shows. */
function buildLegend(pane) {
  const layer = layerOf(pane);
  pane.legend.replaceChildren();
  pane.buttons = new Map();
  if (!layer) {
    const isDense = pane.model.byStack[pane.stack.name].length === 0;
    pane.legend.append(isDense ? "" : "This model has no such layer.");
    return;
  }

  // With very many experts, the busiest as buttons and the others by number.
  const order = layer.load.map((_, expert) => expert);
  if (layer.num_experts > 2 * BUSIEST_BUTTONS) {
    order.sort((a, b) => layer.load[b] - layer.load[a] || a - b);
    order.length = BUSIEST_BUTTONS;
    pane.legend.append(buildExpertInput(pane, layer));
  }
  const total = sum(layer.load) || 1;
  const largest = Math.max(...layer.load) || 1;
  for (const expert of order) {
    const share = layer.load[expert] / total;
    const bar = make("span.bar", { "aria-hidden": "true" }, make("span"));
    bar.firstChild.style.width = `${(100 * layer.load[expert]) / largest}%`;
    const button = make(
      "button.expert",
      {
        type: "button",
        tabindex: "-1",
        data: { hue: hueOf(layer, expert), expert: String(expert) },
        "aria-pressed": "false",
        "aria-label": `Expert ${expert + 1}, ${formatPercent(share)} of the load`,
        title: `${layer.name}, expert ${expert + 1}: ${formatPercent(share)} of the load`,
        on: { click: () => chooseExpert(pane, pane.expert === expert ? null : expert) },
      },
      String(expert + 1),
      bar,
    );
    pane.buttons.set(expert, button);
    pane.legend.append(button);
  }
  const first = pane.buttons.get(pane.expert) ?? pane.buttons.values().next().value;
  first.tabIndex = 0;
  pane.legend.onkeydown = (event) => moveFocus(event, [...pane.buttons.values()]);
}

function buildExpertInput(pane, layer) {
  const input = make("input", {
    type: "number",
    min: 1,
    max: layer.num_experts,
    on: {
      change: () => {
        const number = Math.min(
          Math.max(1, Math.round(Number(input.value) || 1)),
          layer.num_experts,
        );
        chooseExpert(pane, number - 1);
      },
    },
  });
  pane.input = input;
  const range = ` of ${layer.num_experts}; the ${BUSIEST_BUTTONS} busiest: `;
  return make("label.expert-number", "Expert ", input, range);
}

/** Moves the focus among buttons of which one can be reached by Tab. */
function moveFocus(event, buttons) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const place = buttons.indexOf(document.activeElement);
  let target = null;
  if (event.key in steps) {
    target = buttons[place + steps[event.key]];
  } else if (event.key === "Home") {
    target = buttons[0];
  } else if (event.key === "End") {
    target = buttons[buttons.length - 1];
  }
  if (place < 0 || !target) {
    return;
  }
  event.preventDefault();
  buttons.forEach((button) => {
    button.tabIndex = button === target ? 0 : -1;
  });
  target.focus();
}

// ---------------------------------------------------------------------------
// One example

/** Shows an example, from the start or as far as a token of it. */
function showExample(example, stackName = null, token = null) {
  state.example = example;
  state.token = null;
  for (const pane of panes) {
    const { stack } = pane;
    const length = stack.starts[example + 1] - stack.starts[example];
    state.limit[stack.name] = TOKENS_AT_ONCE;
    if (stack.name === stackName) {
      const needed = token - stack.starts[example] + 1;
      state.limit[stack.name] = Math.min(
        length,
        Math.max(needed + TOKENS_AT_ONCE / 2, TOKENS_AT_ONCE),
      );
    }
    fillText(pane);
    paint(pane);
  }
  describeExample();
  renderToken();
}

function describeExample() {
  const shown = content.examples.length;
  const input = document.getElementById("example");
  input.max = shown;
  input.value = state.example + 1;
  document.getElementById("previous").disabled = state.example === 0;
  document.getElementById("next").disabled = state.example === shown - 1;

  const parts = [`of ${formatCount(shown)}`];
  if (shown < content.num_examples) {
    parts.push(`number ${formatCount(content.examples[state.example] + 1)} of the trace`);
  }
  parts.push(`document ${formatCount(content.documents[state.example] + 1)}`);
  if (content.domains[state.example]) {
    parts.push(content.domains[state.example]);
  }
  document.getElementById("example-count").textContent = parts.join(" · ");
}

/** Puts the tokens of the example into a pane. */
function fillText(pane) {
  const { stack } = pane;
  const start = stack.starts[state.example];
  const length = stack.starts[state.example + 1] - start;
  const end = start + Math.min(length, state.limit[stack.name]);
  const isColoured = Boolean(layerOf(pane));
  const fragment = document.createDocumentFragment();
  pane.first = start;
  pane.spans = [];

  // A space stands between words, and belongs to no token.
  for (let token = start; token < end; token += 1) {
    const text = tokenText(stack, token);
    const beginsWord = text.startsWith(" ");
    if (beginsWord && token > start) {
      fragment.append(" ");
    }
    const span = make(
      "span.token",
      { data: { token: String(token) } },
      beginsWord ? text.slice(1) : text,
    );
    if (isColoured) {
      span.setAttribute("role", "button");
      span.tabIndex = token === start ? 0 : -1;
    }
    pane.spans.push(span);
    fragment.append(span);
  }
  pane.text.replaceChildren(fragment);
  fillMore(pane, end - start, length);
}

/** Says how much of a long example is there, and offers the rest. */
function fillMore(pane, shown, length) {
  const { stack } = pane;
  const traced = stack.lengths[state.example];
  pane.more.replaceChildren();
  if (shown < length) {
    const next = Math.min(TOKENS_AT_ONCE, length - shown);
    const onclick = () => {
      state.limit[stack.name] += TOKENS_AT_ONCE;
      panesOf(stack.name).forEach((each) => {
        fillText(each);
        paint(each);
      });
    };
    pane.more.append(
      make(
        "button",
        { type: "button", on: { click: onclick } },
        `Show ${plural(next, "more token")}`,
      ),
    );
  } else if (length < traced) {
    pane.more.append(
      `The first ${formatCount(length)} of its ${plural(traced, "token")}; the others do not fit on the page.`,
    );
  }
}

/** Gives each token of a pane the marks of its layer, and of the chosen expert. */
function paint(pane) {
  const layer = layerOf(pane);
  pane.text.dataset.colours = state.colours;
  if (!layer) {
    pane.spans.forEach((span) => {
      span.className = "token";
      delete span.dataset.hue;
      delete span.dataset.mark;
    });
    return;
  }

  const marksDifferences = document.getElementById("differences")?.checked;
  const twin = panesOf(pane.stack.name).find((other) => other !== pane);
  const twinLayer = twin && marksDifferences ? layerOf(twin) : null;
  pane.spans.forEach((span, place) => {
    const token = pane.first + place;
    const first = firstChoice(layer, token);
    const accepted = acceptance(layer, token);
    const names = ["token"];
    let mark = first < 0 ? "–" : String(first + 1);
    if (!accepted.any) {
      names.push("dropped");
      mark += first < 0 ? "" : "⊘";
    } else if (!accepted.first) {
      names.push("refused");
      mark += "×";
    }

    // Marks of the chosen expert, and of another choice in the other model.
    if (pane.expert !== null && first === pane.expert) {
      names.push("chosen");
    } else if (
      pane.expert !== null &&
      choicesOf(layer, token).some((choice) => choice.expert === pane.expert)
    ) {
      names.push("later");
    }
    if (
      twinLayer &&
      inFirstModel(layer, first) !== inFirstModel(twinLayer, firstChoice(twinLayer, token))
    ) {
      names.push("differs");
    }
    span.className = names.join(" ");
    span.dataset.hue = hueOf(layer, first);
    span.dataset.mark = mark;
  });
}

// ---------------------------------------------------------------------------
// Layers, experts, tokens

/** Shows a layer of a stack in all its panes. */
function showLayer(stackName, number) {
  state.layer[stackName] = number;
  for (const pane of panesOf(stackName)) {
    const layer = layerOf(pane);
    if (layer && pane.expert !== null && pane.expert >= layer.num_experts) {
      pane.expert = null;
    }
    if (layer && pane.expert === null && state.colours === "one") {
      pane.expert = busiest(layer);
    }
    buildLegend(pane);
    paint(pane);
    markButtons(pane);
  }
  nameLayer(stackName);
  renderToken();
  renderExpert();
  refreshCharts();
}

function nameLayer(stackName) {
  const number = state.layer[stackName];
  const total = numLayers(stackName);
  const layer = models.map((model) => model.byStack[stackName][number]).find(Boolean);
  const slider = document.getElementById(`layer-${stackName}`);
  slider.value = number + 1;
  slider.setAttribute("aria-valuetext", `${number + 1} of ${total}`);
  slider.hidden = total === 1;
  document.getElementById(`layer-${stackName}-name`).textContent =
    `${number + 1} of ${total} · ${plural(layer.num_experts, "expert")} · ${layer.router}`;
}

/** Chooses an expert of the layer that a pane shows; null for none. */
function chooseExpert(pane, expert) {
  state.active = expert === null ? null : pane;
  for (const each of panesOf(pane.stack.name)) {
    each.expert = each === pane ? expert : counterpart(layerOf(pane), expert, layerOf(each));
    paint(each);
    markButtons(each);
  }
  renderExpert();
  refreshCharts();
}

/** Returns which expert of another model's layer is the same one; null for none. */
function counterpart(layer, expert, other) {
  if (expert === null || !other) {
    return null;
  }
  const number = inFirstModel(layer, expert);
  const match = other.matches.length ? other.matches.indexOf(number) : number;
  return number < 0 || match < 0 || match >= other.num_experts ? null : match;
}

function markButtons(pane) {
  if (!pane.buttons) {
    return;
  }
  pane.buttons.forEach((button, expert) => {
    button.setAttribute("aria-pressed", String(expert === pane.expert));
  });
  if (pane.input && pane.expert !== null) {
    pane.input.value = pane.expert + 1;
  }
}

function spanAt(event) {
  const span = event.target.closest?.(".token");
  return span ? { span, token: Number(span.dataset.token) } : null;
}

function onToken(event, pane, isFocus) {
  const found = spanAt(event);
  if (!found || !layerOf(pane)) {
    return;
  }
  if (isFocus) {
    pane.spans.forEach((span) => {
      span.tabIndex = span === found.span ? 0 : -1;
    });
  }
  state.token = { stack: pane.stack, token: found.token };
  markTwins();
  renderToken();
}

/** Marks the token that is described, in both models. */
function markTwins() {
  for (const pane of panes) {
    pane.text.querySelector(".current")?.classList.remove("current");
    if (state.token && pane.stack === state.token.stack) {
      pane.spans[state.token.token - pane.first]?.classList.add("current");
    }
  }
}

function chooseAt(event, pane) {
  const found = spanAt(event);
  const layer = layerOf(pane);
  if (found && layer) {
    const first = firstChoice(layer, found.token);
    chooseExpert(pane, first < 0 ? null : first);
    markTwins();
  }
}

function onTextKey(event, pane) {
  const found = spanAt(event);
  if (!found || event.ctrlKey || event.metaKey || event.altKey) {
    return;
  }
  const place = found.token - pane.first;
  const stackName = pane.stack.name;
  const number = state.layer[stackName];
  const actions = {
    ArrowRight: () => pane.spans[place + 1]?.focus(),
    ArrowLeft: () => pane.spans[place - 1]?.focus(),
    Home: () => pane.spans[0].focus(),
    End: () => pane.spans[pane.spans.length - 1].focus(),
    ArrowUp: () => showLayer(stackName, Math.min(number + 1, numLayers(stackName) - 1)),
    ArrowDown: () => showLayer(stackName, Math.max(number - 1, 0)),
    Enter: () => chooseAt(event, pane),
    " ": () => chooseAt(event, pane),
  };
  if (event.key in actions) {
    event.preventDefault();
    actions[event.key]();
  }
}
