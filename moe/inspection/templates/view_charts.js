// ---------------------------------------------------------------------------
// Figures of the whole trace, drawn as wide as they can be

const LOAD_HEIGHT = 96;
const LABEL_SPACE = 22;
const FLOW_HEIGHT = 380;
const FLOW_NODE = 12;
const FLOW_COLUMN = 100;
const CURVE_HEIGHT = 300;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

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
const charts = new Map(
  Object.entries({ "load-charts": drawLoads, "flow-charts": drawFlows, "saturation-chart": drawSaturation })
    .map(([id, draw]) => [document.getElementById(id), draw])
    .filter(([place]) => place),
);
const outdated = new Set();
const inView = new Set();

/** Draws all figures, and from then on again when they come into view and are outdated. */
function buildCharts() {
  charts.forEach((drawChart, place) => drawChart(place));
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) {
        inView.add(target);
        drawOutdated(target);
      } else {
        inView.delete(target);
      }
    }
  }, { rootMargin: "100px" });
  charts.forEach((_, place) => observer.observe(place));
}

/** Lets all figures follow the chosen expert and the width of the page: at once those in view. */
function refreshCharts() {
  for (const place of charts.keys()) {
    outdated.add(place);
    if (inView.has(place)) {
      drawOutdated(place);
    }
  }
}

function drawOutdated(place) {
  if (outdated.delete(place)) {
    charts.get(place)(place);
  }
}

function tooltip(text) {
  return draw("title", {}, text);
}

function label(text, attributes) {
  return draw("text", { class: "label", ...attributes }, text);
}

// ---------------------------------------------------------------------------
// Load and drops

function drawLoads(place) {
  const figures = [];
  for (const model of models) {
    const group = make("div", { class: "figures" });
    if (models.length > 1) {
      figures.push(make("h3", {}, model.name));
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
  const largest = Math.max(...layer.load, 1);
  const even = sum(layer.load) / layer.num_experts;
  const step = width / layer.num_experts;
  const gap = Math.min(6, step / 5);
  const top = 6;
  const y = (count) => top + LOAD_HEIGHT * (1 - count / largest);
  const image = draw("svg", {
    width,
    height: top + LOAD_HEIGHT + LABEL_SPACE,
    role: "img",
    "aria-label": `Load of the experts of ${layer.name}: ${loadSentence(layer)}`,
  });

  const every = Math.max(1, Math.ceil(26 / step));
  layer.load.forEach((count, expert) => {
    const accepted = layer.accepted[expert];
    const x = expert * step + gap / 2;
    const text = `expert ${expert + 1}: ${formatCount(count)} requests, ${formatCount(count - accepted)} refused`;
    const chosen = chosenExpert(model, layer) === expert;
    const group = draw("g", { class: chosen ? "bar-group chosen" : "bar-group", on: { click: () => chooseInLayer(model, layer, expert) } });
    group.append(
      tooltip(text),
      draw("rect", { class: "hit", x: expert * step, y: 0, width: step, height: top + LOAD_HEIGHT + LABEL_SPACE }),
      draw("rect", { class: "accepted", x, y: y(accepted), width: step - gap, height: y(0) - y(accepted) }),
      draw("rect", { class: "refused", x, y: y(count), width: step - gap, height: y(accepted) - y(count) }),
    );
    if (expert % every === 0 || chosen) {
      group.append(label(expert + 1, { x: expert * step + step / 2, y: top + LOAD_HEIGHT + 16, "text-anchor": "middle" }));
    }
    image.append(group);
  });
  image.append(draw("line", { class: "even", x1: 0, x2: width, y1: y(even), y2: y(even) }));
  const caption = make("figcaption", {}, make("strong", {}, layer.name), make("span", { class: "soft" }, ` ${loadSentence(layer)}`));
  return make("figure", {}, caption, image);
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
  const header = ["layer", "tokens", "requests", "refused", "tokens without an expert", "entropy of the router (nats)"];
  return make("details", {}, make("summary", {}, "Numbers"), makeTable(header, rows, [1, 2, 3, 4, 5]));
}

// ---------------------------------------------------------------------------
// Flow

function drawFlows(place) {
  const figures = [];
  for (const model of models) {
    for (const stackName of Object.keys(STACK_TITLES)) {
      const stackFlows = model.flows.filter((flow) => flow.stack === stackName);
      if (stackFlows.length) {
        figures.push(flowFigure(model, stackName, stackFlows, place.clientWidth));
      }
    }
  }
  place.replaceChildren(...figures);
}

function nodeName(node) {
  if (node >= 0) {
    return String(node + 1);
  }
  return node === -1 ? "rest" : "none";
}

/** Returns where the nodes of each layer stand: { node, count, y, height } for each column. */
function flowColumns(stackFlows) {
  const columns = [];
  stackFlows.forEach((flow, i) => {
    if (i === 0) {
      columns.push(flow.nodes.map((node, place) => ({ node, count: sum(flow.counts[place]) })));
    }
    columns.push(flow.next_nodes.map((node, place) => ({ node, count: sum(flow.counts.map((row) => row[place])) })));
  });

  const gap = 4;
  for (const column of columns) {
    const total = sum(column.map((node) => node.count)) || 1;
    const room = FLOW_HEIGHT - gap * (column.length - 1);
    let y = 24;
    for (const node of column) {
      node.y = y;
      node.height = (room * node.count) / total;
      y += node.height + gap;
    }
  }
  return columns;
}

function flowFigure(model, stackName, stackFlows, place) {
  const layers = model.byStack[stackName];
  const columns = flowColumns(stackFlows);
  const width = Math.max(Math.min(place, 260 * columns.length), FLOW_COLUMN * (columns.length - 1) + 80);
  const step = (width - 80) / (columns.length - 1);
  const x = (column) => 40 + column * step;
  const name = models.length > 1 ? `${stackName}, ${model.name}` : stackName;
  const image = draw("svg", { width, height: FLOW_HEIGHT + 34, role: "img", "aria-label": `Flow of tokens through the layers of the ${name}` });

  const bands = [];
  stackFlows.forEach((flow, i) => bands.push(...flowBands(model, layers, flow, i, columns, x)));
  bands.sort((a, b) => a.rank - b.rank);
  image.append(...bands.map((band) => band.path));

  columns.forEach((column, i) => {
    const layer = layers[i];
    image.append(label(layer.name, { x: x(i), y: 12, "text-anchor": "middle" }));
    for (const node of column) {
      const chosen = chosenExpert(model, layer) === node.node;
      const group = draw("g", {
        class: node.node >= 0 ? "node" : "node rest",
        data: { hue: hueOf(layer, node.node) },
        on: node.node >= 0 ? { click: () => chooseInLayer(model, layer, node.node) } : {},
      });
      group.append(
        tooltip(`${layer.name}, expert ${nodeName(node.node)}: ${plural(node.count, "token")}`),
        draw("rect", { x: x(i) - FLOW_NODE / 2, y: node.y, width: FLOW_NODE, height: Math.max(1, node.height) }),
      );
      if (node.height >= 9 || chosen) {
        const isLast = i === columns.length - 1;
        const at = isLast ? x(i) + FLOW_NODE : x(i) - FLOW_NODE;
        const anchor = isLast ? "start" : "end";
        group.append(label(nodeName(node.node), { x: at, y: node.y + node.height / 2 + 4, "text-anchor": anchor, class: chosen ? "label chosen" : "label" }));
      }
      image.append(group);
    }
  });
  const parts = [make("figcaption", {}, make("strong", {}, name)), make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Flow, ${name}` }, image)];
  parts.push(...followingSentences(model, layers, stackFlows), flowNumbers(layers, stackFlows));
  return make("figure", {}, ...parts);
}

/** Returns the bands between two columns; those of the chosen expert are drawn last. */
function flowBands(model, layers, flow, i, columns, x) {
  const bands = [];
  const from = columns[i].map((node) => node.y);
  const to = columns[i + 1].map((node) => node.y);
  const anyFollowed = layers.some((layer) => chosenExpert(model, layer) !== null);

  flow.counts.forEach((row, a) => {
    row.forEach((count, b) => {
      if (!count) {
        return;
      }
      const source = columns[i][a];
      const target = columns[i + 1][b];
      const height = (source.height * count) / source.count;
      const targetHeight = (target.height * count) / target.count;
      const [left, right] = [x(i) + FLOW_NODE / 2, x(i + 1) - FLOW_NODE / 2];
      const middle = (left + right) / 2;
      const path = [
        `M${left},${from[a]}C${middle},${from[a]} ${middle},${to[b]} ${right},${to[b]}`,
        `v${targetHeight}C${middle},${to[b] + targetHeight} ${middle},${from[a] + height} ${left},${from[a] + height}Z`,
      ].join("");
      from[a] += height;
      to[b] += targetHeight;

      const isFrom = chosenExpert(model, layers[i]) === source.node;
      const followed = isFrom || chosenExpert(model, layers[i + 1]) === target.node;
      const text = `${layers[i].name}, expert ${nodeName(source.node)} → ${layers[i + 1].name}, expert ${nodeName(target.node)}: ${plural(count, "token")}, ${formatPercent(count / source.count)} of the first's`;
      const names = ["band", followed ? "followed" : "", anyFollowed && !followed ? "behind" : ""];
      bands.push({
        rank: followed ? 1 : 0,
        path: draw("path", { d: path, class: names.join(" ").trim(), data: { hue: hueOf(layers[i], source.node) } }, tooltip(text)),
      });
    });
  });
  return bands;
}

/** Says where the tokens of the chosen expert go next, beside where all tokens go. */
function followingSentences(model, layers, stackFlows) {
  const sentences = [];
  stackFlows.forEach((flow, i) => {
    const layer = layers[i];
    const expert = chosenExpert(model, layer);
    if (expert === null || !layer.first[expert]) {
      return;
    }
    const next = layers[i + 1];
    const parts = flow.next_experts[expert].filter(([, count]) => count).map(([target, count]) => {
      const share = count / layer.first[expert];
      const lift = share / (next.first[target] / next.num_tokens);
      return `${formatPercent(share)} go on to expert ${target + 1} (${lift.toFixed(1)} × as many as of all tokens)`;
    });
    sentences.push(make("p", {}, `Of the tokens of ${layer.name}, expert ${expert + 1}, in ${next.name}: ${parts.join(", ")}.`));
  });
  return sentences;
}

function flowNumbers(layers, stackFlows) {
  const rows = [];
  stackFlows.forEach((flow, i) => {
    flow.counts.forEach((row, a) => {
      row.forEach((count, b) => {
        if (count) {
          rows.push({ i, from: nodeName(flow.nodes[a]), to: nodeName(flow.next_nodes[b]), count, share: count / sum(row) });
        }
      });
    });
  });
  rows.sort((a, b) => b.count - a.count);
  const cells = rows.slice(0, 30).map((row) => [
    `${layers[row.i].name}, ${row.from}`,
    `${layers[row.i + 1].name}, ${row.to}`,
    formatCount(row.count),
    formatPercent(row.share),
  ]);
  const header = ["from expert", "to expert", "tokens", "of the first's tokens"];
  return make("details", {}, make("summary", {}, `The ${cells.length} widest bands as numbers`), makeTable(header, cells, [2, 3]));
}

// ---------------------------------------------------------------------------
// Saturation

function drawSaturation(place) {
  const curves = new Map();
  for (const point of content.saturation) {
    const name = `${point.key[0]} ${point.key[1] + 1}`;
    if (!curves.has(name)) {
      curves.set(name, []);
    }
    curves.get(name).push([point.step, point.value]);
  }

  const steps = content.saturation.map((point) => point.step);
  const values = content.saturation.map((point) => point.value);
  const lowest = Math.min(0, ...values);
  const highest = Math.max(1, ...values);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const width = Math.min(place.clientWidth, 900);
  const x = (step) => 44 + ((width - 64) * (step - first)) / (last - first || 1);
  const y = (value) => 10 + CURVE_HEIGHT * (1 - (value - lowest) / (highest - lowest));
  const image = draw("svg", { width, height: CURVE_HEIGHT + 52, role: "img", "aria-label": "Saturation over training steps, a curve for each layer" });

  for (const value of [lowest, 0, 0.25, 0.5, 0.75, 1].filter((each, i, all) => all.indexOf(each) === i)) {
    image.append(draw("line", { class: "grid", x1: 44, x2: width - 20, y1: y(value), y2: y(value) }));
    image.append(label(formatNumber(value), { x: 38, y: y(value) + 4, "text-anchor": "end" }));
  }
  stepLabels(steps, x).forEach((step) => image.append(label(formatCount(step), { x: x(step), y: CURVE_HEIGHT + 28, "text-anchor": "middle" })));
  image.append(label("training step", { x: 44 + (width - 64) / 2, y: CURVE_HEIGHT + 46, "text-anchor": "middle" }));

  const legend = make("ul", { class: "curves" });
  [...curves].forEach(([name, curve], number) => {
    curve.sort((a, b) => a[0] - b[0]);
    const hue = String(number % NUM_HUES);
    const dash = DASHES[Math.floor(number / NUM_HUES) % DASHES.length];
    const line = draw("polyline", { class: "curve", data: { hue }, points: curve.map(([step, value]) => `${x(step)},${y(value)}`).join(" "), "stroke-dasharray": dash });
    image.append(line, ...curve.map(([step, value]) => curvePoint(number, hue, x(step), y(value), `${name}, step ${formatCount(step)}: ${formatNumber(value)}`)));
    const sample = draw("svg", { width: 34, height: 14, "aria-hidden": "true" }, draw("line", { class: "curve", data: { hue }, x1: 1, x2: 33, y1: 7, y2: 7, "stroke-dasharray": dash }), curvePoint(number, hue, 17, 7, name));
    legend.append(make("li", {}, sample, ` ${name}`));
  });

  const rows = content.saturation.map((point) => [`${point.key[0]} ${point.key[1] + 1}`, formatCount(point.step), formatNumber(point.value, 3)]);
  const numbers = make("details", {}, make("summary", {}, "Numbers"), makeTable(["layer", "step", "saturation"], rows, [1, 2]));
  place.replaceChildren(make("figure", {}, legend, image), numbers);
}

/** Returns the steps that have room for a label below the curves. */
function stepLabels(steps, x) {
  const labels = [];
  for (const step of [...new Set(steps)].sort((a, b) => a - b)) {
    if (!labels.length || x(step) - x(labels[labels.length - 1]) >= 64) {
      labels.push(step);
    }
  }
  return labels;
}

/** Returns a point; curves differ in its shape too. */
function curvePoint(number, hue, x, y, text) {
  const shapes = [
    `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
    `M${x - 4},${y - 4}h8v8h-8z`,
    `M${x},${y - 5}l5,9h-10z`,
    `M${x},${y - 5}l5,5l-5,5l-5,-5z`,
  ];
  return draw("path", { class: "point", data: { hue }, d: shapes[number % shapes.length] }, tooltip(text));
}
