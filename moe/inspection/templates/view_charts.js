// ---------------------------------------------------------------------------
// Figures of the whole trace, drawn as wide as they can be

const LOAD_HEIGHT = 96;
const LOAD_TOP = 6;
const LABEL_SPACE = 22;
const NUMBER_SPACE = 26;

/** Chooses an expert of a model's layer, and shows that layer. */
function chooseInLayer(model, layer, expert) {
  const pane = panes.find((each) => each.model === model && each.stack.name === layer.stack);
  if (!pane) {
    return;
  }
  if (state.layer[layer.stack] !== layer.layer) {
    showLayer(layer.stack, layer.layer);
  }
  chooseExpert(pane, expert);
}

/** Returns the expert of a layer that is marked in the text; null for none. */
function chosenExpert(model, layer) {
  const pane = panes.find((each) => each.model === model && each.stack === state.active?.stack);
  return pane && layerOf(pane) === layer ? pane.expert : null;
}

/** Figures by the element that they are drawn into; not each page has all. */
const charts = new Map();
const whenInView = new IntersectionObserver(
  (entries) => {
    for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
      whenInView.unobserve(target);
      charts.get(target)(target);
    }
  },
  { rootMargin: "100px" },
);

function buildCharts() {
  for (const [id, drawChart] of Object.entries({
    "load-charts": drawLoads,
    "flow-charts": drawFlows,
  })) {
    const place = document.getElementById(id);
    if (place) {
      drawChart(place);
      charts.set(place, drawChart);
    }
  }
}

/** Lets all figures follow the chosen expert and the width of the page, as soon as they are in view. */
function refreshCharts() {
  for (const place of charts.keys()) {
    whenInView.unobserve(place);
    whenInView.observe(place);
  }
}

function tooltip(text) {
  return draw("title", text);
}

function label(text, attributes) {
  return draw("text.label", { ...attributes }, text);
}

// ---------------------------------------------------------------------------
// Load and drops

function drawLoads(place) {
  const figures = [];
  for (const model of models) {
    const group = make("div.figures");
    if (models.length > 1) {
      figures.push(make("h3", model.name));
    }
    figures.push(group);
    const columns = Math.min(model.layers.length, Math.max(1, Math.floor(place.clientWidth / 420)));
    group.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    const width = (place.clientWidth - (columns - 1) * 24) / columns;
    model.layers.forEach((layer) => group.append(loadFigure(model, layer, width)));
  }
  figures.push(loadNumbers());
  place.replaceChildren(...figures);
}

function loadSentence(layer) {
  const asked = sum(layer.load);
  const refused = asked - sum(layer.accepted);
  const even = asked / layer.num_experts || 1;
  const dead = layer.load.filter((count) => count === 0).length;
  return [
    `${formatPercent(layer.dropped_tokens / Math.max(1, layer.num_tokens))} of the tokens reach no expert`,
    `${formatPercent(refused / Math.max(1, asked))} of the requests refused`,
    `busiest expert ${(Math.max(...layer.load) / even).toFixed(2)} × even`,
    `${dead} of ${layer.num_experts} dead`,
  ].join(" · ");
}

function loadFigure(model, layer, width) {
  const sentence = loadSentence(layer);
  const summary = make("span.soft", ` ${sentence}`);
  const image = draw("svg", {
    width,
    height: LOAD_TOP + LOAD_HEIGHT + LABEL_SPACE,
    role: "img",
    "aria-label": `Load of the experts of ${layer.name}: ${sentence}`,
  });
  const largest = Math.max(...layer.load, 1);
  const scale = {
    step: width / layer.num_experts,
    y: (count) => LOAD_TOP + LOAD_HEIGHT * (1 - count / largest),
  };
  layer.load.forEach((_, expert) => image.append(loadBar(model, layer, expert, scale)));

  // What every expert would have if all were alike.
  const even = scale.y(sum(layer.load) / layer.num_experts);
  image.append(draw("line.even", { x1: 0, x2: width, y1: even, y2: even }));
  return make("figure", make("figcaption", make("strong", layer.name), summary), image);
}

/** Returns the bar of an expert: what was accepted, and on it what was refused. */
function loadBar(model, layer, expert, { step, y }) {
  const asked = layer.load[expert];
  const accepted = layer.accepted[expert];
  const isMarked = chosenExpert(model, layer) === expert;
  const gap = Math.min(6, step / 5);
  const box = { x: expert * step + gap / 2, width: step - gap };
  const refused = formatCount(asked - accepted);
  const group = draw(
    "g",
    {
      class: isMarked ? "bar-group chosen" : "bar-group",
      on: { click: () => chooseInLayer(model, layer, expert) },
    },
    tooltip(`expert ${expert + 1}: ${plural(asked, "request")}, ${refused} refused`),
    draw("rect.hit", { x: expert * step, y: 0, width: step, height: y(0) + LABEL_SPACE }),
    draw("rect.accepted", { ...box, y: y(accepted), height: y(0) - y(accepted) }),
    draw("rect.refused", { ...box, y: y(asked), height: y(accepted) - y(asked) }),
  );

  // Where bars are narrow only some have a number.
  const every = Math.max(1, Math.ceil(NUMBER_SPACE / step));
  if (expert % every === 0 || isMarked) {
    const place = { x: (expert + 0.5) * step, y: y(0) + 16, "text-anchor": "middle" };
    group.append(label(expert + 1, place));
  }
  return group;
}

/** Returns the numbers behind the bars, closed until someone wants them. */
function loadNumbers() {
  const rows = [];
  for (const model of models) {
    for (const layer of model.layers) {
      const asked = sum(layer.load);
      const refused = asked - sum(layer.accepted);
      rows.push([
        models.length > 1 ? `${layer.name}, ${model.name}` : layer.name,
        formatCount(layer.num_tokens),
        formatCount(asked),
        formatCount(refused),
        formatCount(layer.dropped_tokens),
        `${formatNumber(layer.entropy)} of ${formatNumber(Math.log(layer.num_experts))}`,
      ]);
    }
  }
  const header = [
    "layer",
    "tokens",
    "requests",
    "refused",
    "tokens without an expert",
    "entropy of the router (nats)",
  ];
  return make("details", make("summary", "Numbers"), makeTable(header, rows, [1, 2, 3, 4, 5]));
}
