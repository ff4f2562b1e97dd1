// Applies the page's theme colours to a Plotly figure; lines have their own colours.
const LETTER_PX = 6.5;

function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

// Shows as many labels as fit: names of policies inside the plot, labels of marks above it. Those of new policies come
// first, then the newest. A label without room on its right goes to the left of its place, except into another band.
function visibleLabels(layout, width, letter) {
  const [from, to] = layout.xaxis.range.map((at) => Date.parse(at));
  const place = (label) => ((Date.parse(label.x) - from) / (to - from)) * width;
  const fitting = (labels) => {
    const taken = [];
    return labels.sort((one, other) => (other.name === "publication") - (one.name === "publication") || place(other) - place(one)).flatMap((label, index) => {
      const at = Math.max(place(label), 0), length = label.text.length * letter;
      const starts = label.name === "policy" && index ? [at] : [at, at - length];
      const start = starts.find((from) => from >= 0 && from + length <= width && taken.every(([low, high]) => from >= high || from + length <= low));
      if (at > width || start === undefined) return [];
      taken.push([start - letter, start + length + letter]);
      return [{ ...label, xanchor: start < at ? "right" : "left", ...(at === 0 && { xref: "paper", x: 0 }) }];
    });
  };
  const labels = layout.annotations ?? [];
  return [...fitting(labels.filter((label) => label.name === "policy")), ...fitting(labels.filter((label) => label.name !== "policy"))];
}

// The name of the chart's time zone, at the left edge, clear of the axis labels.
const zoneLabel = (zone, color, margin, size) => ({ text: zone, xref: "paper", yref: "paper", x: 0, y: 0, xanchor: "left", yanchor: "top", xshift: -margin, yshift: -4, showarrow: false, font: { size, color } });

// ``width``: of the plot with its margins. ``scale``: of letters and margins.
export function themed({ margin, ...layout }, width, zone = "", scale = 1) {
  const around = Object.fromEntries(Object.entries(margin).map(([side, px]) => [side, px * scale]));
  const inner = width - around.l - around.r;
  const ink = colour("--ink-2"), line = colour("--line"), surface = colour("--surface"), strong = colour("--ink");
  const axis = { gridcolor: line, linecolor: line, tickcolor: line, zerolinecolor: line, tickfont: { color: ink, size: 11 * scale } };
  return {
    ...layout,
    margin: around,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: ink, size: 12 * scale },
    xaxis: { ...layout.xaxis, ...axis, spikecolor: ink, spikethickness: 1, spikedash: "solid" },
    yaxis: { ...layout.yaxis, ...axis },
    hoverlabel: { bgcolor: surface, bordercolor: line, font: { color: strong, size: 12 }, align: "left" },
    annotations: [...visibleLabels(layout, inner, LETTER_PX * scale).map((label) => ({ ...label, bgcolor: label.name === "policy" && `color-mix(in srgb, ${surface} 60%, transparent)`, font: { ...label.font, size: (label.font?.size ?? 12) * scale, color: strong } })), ...(zone ? [zoneLabel(zone, ink, around.l, 10 * scale)] : [])],
  };
}
