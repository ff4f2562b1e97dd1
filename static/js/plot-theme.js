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

// Labels of marks, as many as fit beside each other, to the left of their mark where the right has no room.
function apart(layout, width) {
  const [from, to] = layout.xaxis.range.map((at) => Date.parse(at));
  let free = -Infinity;
  return (layout.annotations ?? []).flatMap((one) => {
    const length = one.text.length * LETTER_PX;
    const at = ((Date.parse(one.x) - from) / (to - from)) * width;
    const left = at + length > width;
    const start = left ? at - length : at;
    if (start < free) return [];
    free = start + length + LETTER_PX;
    return [{ ...one, xanchor: left ? "right" : "left" }];
  });
}

// The clock of a chart's times, at the left edge, where the label of a time at the axes' corner does not reach.
const clock = (zone, color, margin) => ({ text: zone, xref: "paper", yref: "paper", x: 0, y: 0, xanchor: "left", yanchor: "top", xshift: -margin, yshift: -4, showarrow: false, font: { size: 10, color } });

export function themed(layout, width, zone = "") {
  const ink = colour("--ink-2"), line = colour("--line"), surface = colour("--surface"), strong = colour("--ink");
  const axis = { gridcolor: line, linecolor: line, tickcolor: line, zerolinecolor: line, tickfont: { color: ink, size: 11 } };
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: ink, size: 12 },
    xaxis: { ...layout.xaxis, ...axis, spikecolor: ink, spikethickness: 1, spikedash: "solid" },
    yaxis: { ...layout.yaxis, ...axis },
    hoverlabel: { bgcolor: surface, bordercolor: line, font: { color: strong, size: 12 }, align: "left" },
    annotations: [...apart(layout, width).map((one) => ({ ...one, font: { ...one.font, color: strong } })), ...(zone ? [clock(zone, ink, layout.margin.l)] : [])],
  };
}
