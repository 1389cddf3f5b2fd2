// The calculator's page: reads the controls, asks plan.js, draws bars, a sentence and the lines against the chunk.
"use strict";

(() => {
  const COLORS = { naive: "#d55e00", inplace: "#0072b2", fused: "#009e73" };
  const MULTIPLES = { vocab: 64, tokens: 1, width: 64, chunk: 1 };
  const UNITS = { vocab: "words", tokens: "tokens", width: "numbers a token", chunk: "tokens at a time" };
  const CHUNKS = Array.from({ length: 61 }, (_, i) => Math.round(2 ** (5 + i / 4)));
  const element = (id) => document.getElementById(id);
  const number = (value) => Math.round(value).toLocaleString("en");

  function bytes(value) {
    const [unit, name] = value >= 2 ** 30 ? [2 ** 30, "GiB"] : value >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
    const scaled = value / unit;
    return `${scaled >= 100 ? number(scaled) : scaled.toPrecision(3)} ${name}`;
  }

  function times(ratio) {
    return ratio >= 10 ? number(ratio) : ratio.toPrecision(2);
  }

  function readHead() {
    const [dtype, weightDtype] = element("dtype").value.split(",");
    const head = { dtype, weightDtype };
    for (const name of Object.keys(UNITS)) {
      const input = element(name);
      head[name] = Math.min(Math.max(Math.round(Number(input.value)) || 1, 1), Number(input.max));
    }
    return head;
  }

  // Each way: its name, colour and bytes, of these the fp32 sum and the copies.
  function ways(head) {
    const all = others(head), fused = predict(head, "tokens", head.chunk), slabs = predict(head, "vocab", head.chunk);
    const way = (name, backend, bytes, sum, casts) => ({ name, color: COLORS[backend], bytes, sum, casts });
    return {
      textbook: way("naive, textbook: 3 × logits", "naive", all.textbook + all.casts, 0, all.casts),
      eager: way("naive, as eager PyTorch peaks", "naive", all.eager + all.casts, 0, all.casts),
      inplace: way("inplace: 1 × logits", "inplace", all.inplace + all.casts, 0, all.casts),
      fused: way(
        fused.chunk >= head.tokens ? "fused: all tokens at once" : `fused: ${number(fused.chunk)} tokens at a time`,
        "fused", fused.transient, fused.sum, fused.casts,
      ),
      vocab: way("fused: vocabulary slabs", "fused", slabs.transient, 0, Math.min(slabs.casts, slabs.transient)),
    };
  }

  function drawBars(found) {
    const largest = Math.max(...Object.values(found).map((way) => way.bytes));
    element("bars").replaceChildren(...Object.entries(found).map(([key, way]) => {
      const row = document.createElement("div"), name = document.createElement("span");
      const track = document.createElement("div"), value = document.createElement("span");
      row.className = "bar";
      row.dataset.way = key;
      name.textContent = way.name;
      track.className = "track";
      for (const [kind, part] of [["logits", way.bytes - way.sum - way.casts], ["sum", way.sum], ["casts", way.casts]]) {
        const segment = document.createElement("div");
        segment.className = `segment ${kind}`;
        segment.style.width = `${(78 * part) / largest}%`;
        if (kind !== "casts") segment.style.backgroundColor = way.color;
        track.append(segment);
      }
      value.className = "value";
      value.textContent = bytes(way.bytes);
      track.append(value);
      row.append(name, track);
      return row;
    }));
  }

  function sentence(head, { eager, fused, vocab }) {
    const share = (part) => `${Math.round((100 * part) / fused.bytes)}%`;
    const cut = predict(head, "tokens", head.chunk), whole = predict(head, "tokens", head.tokens);
    const ratio = eager.bytes / fused.bytes;
    const compared = ratio >= 1 ? `${times(ratio)} × less than naive` : `${times(1 / ratio)} × more than naive`;
    let words = `fused needs ${compared}`;
    if (cut.chunk >= head.tokens) {
      words = `The chunk holds all ${number(head.tokens)} tokens: nothing is cut up, and fused needs ${compared}.`;
    } else if (fused.sum > 0.005 * fused.bytes) {
      words += `; the fp32 sum of the weight's gradient is ${share(fused.sum)} of it.`;
    } else if (fused.casts > 0.5 * fused.bytes) {
      words += `; ${share(fused.casts)} of it is copies that autocast makes for every loss.`;
    } else {
      words += `, in ${number(Math.ceil(head.tokens / cut.chunk))} chunks.`;
    }
    if (whole.chunk === head.tokens && whole.transient < fused.bytes) {
      words += ` A chunk of all tokens is ${times(fused.bytes / whole.transient)} × smaller, and faster.`;
    }
    if (vocab.bytes < 0.9 * fused.bytes) {
      words += ` Vocabulary slabs need ${times(fused.bytes / vocab.bytes)} × less still, for a fourth matrix product.`;
    }
    return words;
  }

  function shape(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    return node;
  }

  function drawAgainstChunk(head, found) {
    const svg = element("against-chunk"), width = Math.max(svg.clientWidth, 320);
    const [left, right, top, bottom] = [64, width - 92, 12, 250];
    svg.setAttribute("viewBox", `0 0 ${width} 300`);
    const lines = [
      ["naive", COLORS.naive, "", CHUNKS.map(() => found.eager.bytes)],
      ["inplace", COLORS.inplace, "8 4", CHUNKS.map(() => found.inplace.bytes)],
      ["fused, tokens", COLORS.fused, "", CHUNKS.map((chunk) => predict(head, "tokens", chunk).transient)],
      ["fused, slabs", COLORS.fused, "3 3", CHUNKS.map((chunk) => predict(head, "vocab", chunk).transient)],
    ];
    const values = lines.flatMap((line) => line[3]);
    const low = Math.floor(Math.log2(Math.min(...values))), high = Math.ceil(Math.log2(Math.max(...values)) + 0.2);
    const x = (chunk) => left + ((right - left) * (Math.log2(chunk) - 5)) / 15;
    const y = (value) => bottom - ((bottom - top) * (Math.log2(value) - low)) / (high - low);
    const nodes = [];
    for (let power = low; power <= high; power += Math.ceil((high - low) / 6)) {
      nodes.push(shape("line", { x1: left, x2: right, y1: y(2 ** power), y2: y(2 ** power), stroke: "#ddd" }));
      nodes.push(shape("text", { x: left - 6, y: y(2 ** power) + 4, "text-anchor": "end" }, bytes(2 ** power)));
    }
    for (let power = 5; power <= 20; power += width < 500 ? 5 : 3) {
      nodes.push(shape("text", { x: x(2 ** power), y: bottom + 18, "text-anchor": "middle" }, number(2 ** power)));
    }
    nodes.push(shape("text", { x: (left + right) / 2, y: bottom + 40, "text-anchor": "middle" }, "chunk (tokens)"));
    const mark = (value, text, dash, height) => {
      const at = x(Math.min(Math.max(value, 32), 2 ** 20)), [side, anchor] = at > right - 80 ? [-4, "end"] : [4, "start"];
      nodes.push(shape("line", { x1: at, x2: at, y1: top, y2: bottom, stroke: "#444", "stroke-dasharray": dash }));
      nodes.push(shape("text", { x: at + side, y: height, "text-anchor": anchor }, text));
    };
    mark(head.chunk, "chunk", "", top + 10);
    mark(head.tokens, "all tokens", "2 4", bottom - 6);
    let free = top;
    for (const [name, color, dash, points] of lines.sort((one, other) => other[3][60] - one[3][60])) {
      const path = points.map((value, i) => `${i ? "L" : "M"}${x(CHUNKS[i]).toFixed(1)},${y(value).toFixed(1)}`).join("");
      nodes.push(shape("path", { d: path, fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
      const at = Math.max(y(points[60]) + 4, free);
      free = at + 14;
      nodes.push(shape("text", { x: right + 8, y: at, fill: color }, name));
    }
    svg.replaceChildren(...nodes);
  }

  function update() {
    const head = readHead(), found = ways(head);
    for (const [name, unit] of Object.entries(UNITS)) {
      const words = `${number(head[name])} ${unit}`;
      element(`${name}-words`).textContent = words;
      element(`${name}-slider`).setAttribute("aria-valuetext", words);
    }
    drawBars(found);
    element("sentence").textContent = sentence(head, found);
    drawAgainstChunk(head, found);
  }

  for (const name of Object.keys(UNITS)) {
    const slider = element(`${name}-slider`), input = element(name);
    slider.value = Math.log2(input.value);
    slider.addEventListener("input", () => {
      input.value = Math.max(Math.round(2 ** slider.value / MULTIPLES[name]), 1) * MULTIPLES[name];
      update();
    });
    input.addEventListener("input", () => {
      if (Number(input.value) >= 1) slider.value = Math.log2(input.value);
      update();
    });
  }
  element("dtype").addEventListener("input", update);
  window.addEventListener("resize", update);
  update();
})();
