// ---------------------------------------------------------------------------
// Flow from layer to layer

const FLOW_HEIGHT = 380;
const FLOW_TOP = 24;
const FLOW_MARGIN = 40;
const FLOW_NODE = 12;
const FLOW_GAP = 4;
const NARROWEST_STEP = 100;
const WIDEST_STEP = 330;
const LISTED_BANDS = 30;

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
      columns.push(flow.nodes.map((node, a) => ({ node, count: sum(flow.counts[a]) })));
    }
    const arriving = (b) => sum(flow.counts.map((row) => row[b]));
    columns.push(flow.next_nodes.map((node, b) => ({ node, count: arriving(b) })));
  });

  // Each column is as high as the others, whatever the number of its nodes.
  for (const column of columns) {
    const total = sum(column.map((node) => node.count)) || 1;
    const room = FLOW_HEIGHT - FLOW_GAP * (column.length - 1);
    let y = FLOW_TOP;
    for (const node of column) {
      node.y = y;
      node.height = (room * node.count) / total;
      y += node.height + FLOW_GAP;
    }
  }
  return columns;
}

function flowFigure(model, stackName, stackFlows, room) {
  const layers = model.byStack[stackName];
  const columns = flowColumns(stackFlows);
  const name = models.length > 1 ? `${stackName}, ${model.name}` : stackName;
  const image = flowImage(model, layers, stackFlows, columns, room);
  image.setAttribute("aria-label", `Flow of tokens through the layers of the ${name}`);
  return make(
    "figure",
    make("figcaption", make("strong", name)),
    scrollable(name, image),
    ...followingSentences(model, layers, stackFlows),
    flowNumbers(layers, stackFlows),
  );
}

function flowImage(model, layers, stackFlows, columns, room) {
  const numSteps = columns.length - 1;
  const evenStep = (room - 2 * FLOW_MARGIN) / numSteps;
  const step = Math.max(NARROWEST_STEP, Math.min(WIDEST_STEP, evenStep));
  const x = (column) => FLOW_MARGIN + column * step;
  const width = 2 * FLOW_MARGIN + numSteps * step;
  const image = draw("svg", { width, height: FLOW_TOP + FLOW_HEIGHT + 10, role: "img" });

  // Bands of the chosen expert lie on top of the others, and nodes on all bands.
  const bands = stackFlows.flatMap((flow, i) => flowBands(model, layers, flow, i, columns, x));
  bands.sort((a, b) => a.isFollowed - b.isFollowed);
  image.append(...bands.map((band) => band.path));
  columns.forEach((column, i) => {
    image.append(label(layers[i].name, { x: x(i), y: 12, "text-anchor": "middle" }));
    const isLast = i === numSteps;
    column.forEach((node) => image.append(flowNode(model, layers[i], node, x(i), isLast)));
  });
  return image;
}

function flowNode(model, layer, node, x, isLast) {
  const isExpert = node.node >= 0;
  const isMarked = isExpert && chosenExpert(model, layer) === node.node;
  const choose = { click: () => chooseInLayer(model, layer, node.node) };
  const group = draw(
    "g",
    {
      class: isExpert ? "node" : "node rest",
      data: { hue: hueOf(layer, node.node) },
      on: isExpert ? choose : {},
    },
    tooltip(`${layer.name}, expert ${nodeName(node.node)}: ${plural(node.count, "token")}`),
    draw("rect", {
      x: x - FLOW_NODE / 2,
      y: node.y,
      width: FLOW_NODE,
      height: Math.max(1, node.height),
    }),
  );

  // A node that is low has no room for its number.
  if (node.height >= 9 || isMarked) {
    const place = {
      x: isLast ? x + FLOW_NODE : x - FLOW_NODE,
      y: node.y + node.height / 2 + 4,
      "text-anchor": isLast ? "start" : "end",
      class: isMarked ? "label chosen" : "label",
    };
    group.append(label(nodeName(node.node), place));
  }
  return group;
}

/** Returns the bands between two columns, each with whether it is of the chosen expert. */
function flowBands(model, layers, flow, i, columns, x) {
  const isAnyFollowed = layers.some((layer) => chosenExpert(model, layer) !== null);
  const left = x(i) + FLOW_NODE / 2;
  const right = x(i + 1) - FLOW_NODE / 2;
  const from = columns[i].map((node) => node.y);
  const to = columns[i + 1].map((node) => node.y);

  const bands = [];
  flow.counts.forEach((row, a) => {
    row.forEach((count, b) => {
      if (!count) {
        return;
      }
      const source = columns[i][a];
      const target = columns[i + 1][b];
      const height = (source.height * count) / source.count;
      const targetHeight = (target.height * count) / target.count;
      const isFrom = chosenExpert(model, layers[i]) === source.node;
      const isFollowed = isFrom || chosenExpert(model, layers[i + 1]) === target.node;
      const ends = [layers[i], source.node, layers[i + 1], target.node];
      const path = draw(
        "path",
        {
          d: bandPath(left, from[a], height, right, to[b], targetHeight),
          class: `band ${bandKind(isFollowed, isAnyFollowed)}`,
          data: { hue: hueOf(layers[i], source.node) },
        },
        tooltip(bandText(...ends, count, source.count)),
      );
      bands.push({ isFollowed, path });
      from[a] += height;
      to[b] += targetHeight;
    });
  });
  return bands;
}

function bandPath(left, top, height, right, targetTop, targetHeight) {
  const middle = (left + right) / 2;
  const bottom = top + height;
  const targetBottom = targetTop + targetHeight;
  return [
    `M${left},${top}C${middle},${top} ${middle},${targetTop} ${right},${targetTop}`,
    `V${targetBottom}C${middle},${targetBottom} ${middle},${bottom} ${left},${bottom}Z`,
  ].join("");
}

function bandKind(isFollowed, isAnyFollowed) {
  if (isFollowed) {
    return "followed";
  }
  return isAnyFollowed ? "behind" : "";
}

function bandText(layer, node, nextLayer, nextNode, count, total) {
  const from = `${layer.name}, expert ${nodeName(node)}`;
  const to = `${nextLayer.name}, expert ${nodeName(nextNode)}`;
  const share = formatPercent(count / total);
  return `${from} → ${to}: ${plural(count, "token")}, ${share} of the first's`;
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
    const targets = flow.next_experts[expert].filter(([, count]) => count);
    const parts = targets.map(([target, count]) => {
      const share = count / layer.first[expert];
      const lift = share / (next.first[target] / next.num_tokens);
      const times = `${lift.toFixed(1)} × as many as of all tokens`;
      return `${formatPercent(share)} go on to expert ${target + 1} (${times})`;
    });
    const start = `Of the tokens of ${layer.name}, expert ${expert + 1}, in ${next.name}`;
    sentences.push(make("p", `${start}: ${parts.join(", ")}.`));
  });
  return sentences;
}

function flowNumbers(layers, stackFlows) {
  const bands = [];
  stackFlows.forEach((flow, i) => {
    flow.counts.forEach((row, a) => {
      row.forEach((count, b) => {
        const from = `${layers[i].name}, ${nodeName(flow.nodes[a])}`;
        const to = `${layers[i + 1].name}, ${nodeName(flow.next_nodes[b])}`;
        bands.push({ from, to, count, share: count / sum(row) });
      });
    });
  });
  const widest = bands.filter((band) => band.count).sort((a, b) => b.count - a.count);
  const rows = widest
    .slice(0, LISTED_BANDS)
    .map((band) => [band.from, band.to, formatCount(band.count), formatPercent(band.share)]);
  const header = ["from expert", "to expert", "tokens", "of the first's tokens"];
  const summary = make("summary", `The ${rows.length} widest bands as numbers`);
  return make("details", summary, makeTable(header, rows, [2, 3]));
}
