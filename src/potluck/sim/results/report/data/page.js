"use strict";
// Shows values under the pointer, and switches between light and dark. The page is whole without it.
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  const plain = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3)));
  const clock = (s) => {
    if (s < 120) return `${+s.toFixed(1)} s`;
    if (s < 7200) return `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")} min`;
    return `${Math.floor(s / 3600)}:${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} h`;
  };
  const length = (s) => (s < 1 ? `${plain(s * 1000)} ms` : `${plain(s)} s`);

  // Each kind of plot: the pointer's place (0..1 across, y in the plot's units) to lines of text.
  const tell = {
    time(data, share) {
      const at = share * data.end;
      const rows = data.lines.map(([label, values]) => {
        const i = Math.min(values.length - 1, Math.floor(share * values.length));
        return `${label}: ${plain(values[i])}${data.unit ? ` ${data.unit}` : ""}`;
      });
      return [clock(at), ...rows];
    },
    cdf(data, share) {
      const at = data.low * Math.pow(data.high / data.low, share);
      const rows = data.lines.map(([label, xs, ys]) => {
        let i = xs.findIndex((x) => x > at);
        if (i === 0) return `${label}: 0 %`;
        if (i < 0) return `${label}: 100 %`;
        const part = xs[i] > xs[i - 1] ? (at - xs[i - 1]) / (xs[i] - xs[i - 1]) : 1;
        return `${label}: ${plain(100 * (ys[i - 1] + part * (ys[i] - ys[i - 1])))} %`;
      });
      return [`up to ${length(at)}`, ...rows];
    },
    heat(data, share, y) {
      const row = Math.floor((y - data.top) / data.row);
      if (row < 0 || row >= data.labels.length) return null;
      const cells = data.cells[row];
      const value = cells[Math.min(cells.length - 1, Math.floor(share * cells.length))];
      return [data.labels[row], `${clock(share * data.end)}: ${value === null ? "not there" : `${value}${data.unit}`}`];
    },
  };

  const show = (lines, event) => {
    tip.replaceChildren();
    lines.forEach((text, i) => {
      const part = document.createElement(i ? "div" : "b");
      part.textContent = text;
      tip.append(part);
    });
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - box.height - 8)}px`;
  };

  for (const plot of document.querySelectorAll("svg[data-hover]")) {
    const data = JSON.parse(plot.dataset.hover);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    plot.append(cursor);
    const hide = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const view = plot.viewBox.baseVal;
      const x = ((event.clientX - box.left) / box.width) * view.width;
      const y = ((event.clientY - box.top) / box.height) * view.height;
      const share = (x - data.left) / (data.right - data.left);
      const lines = share < 0 || share > 1 ? null : tell[data.kind](data, share, y);
      if (!lines) { hide(); return; }
      cursor.setAttribute("d", `M${x} 10V${view.height - 34}`);
      show(lines, event);
    });
  }
})();
