// Builds static/vendor/plotly/plotly.min.js: of Plotly only what our charts use. The command is in
// static/vendor/README.md; it runs in a folder where npm installed plotly.js and esbuild.
import { readFile } from "node:fs/promises";
import { build } from "esbuild";

const REGISTERED = [
  "traces/scatter", "traces/bar",
  "components/annotations", "components/shapes", "components/errorbars", "components/fx",
  "components/legend", "components/modebar", // never shown, but needed to draw hover boxes and the frame
  "locale-en", "locale-en-us",
];
const ENTRY = `
  const registry = require("plotly.js/src/registry");
  require("plotly.js/build/plotcss");
  const methods = require("plotly.js/src/plot_api");
  for (const name of Object.keys(methods)) registry.register({ moduleType: "apiMethod", name, fn: methods[name] });
  registry.register([${REGISTERED.map((name) => `require("plotly.js/src/${name}")`)}]);
  module.exports = { react: methods.react, relayout: methods.relayout };
`;

// Texts for Plotly's own documentation, which its published bundles leave out too; and styles of maps.
const DESCRIPTIONS = /^\s*description: (?:'[^\n]*'|"[^\n]*"|`[^`]*`|\[[^\]]*\]\.join\([^)]*\)),?$/gm;
const smaller = {
  name: "smaller",
  setup({ onLoad }) {
    onLoad({ filter: /plotly\.js\/src\/.*\.js$/ }, async ({ path }) => ({ contents: (await readFile(path, "utf8")).replace(DESCRIPTIONS, "") }));
    onLoad({ filter: /\.css$/ }, () => ({ contents: "" }));
  },
};

await build({
  stdin: { contents: ENTRY, resolveDir: process.cwd() },
  bundle: true, minify: true, format: "iife", globalName: "Plotly", target: "es2022",
  define: { global: "window", "define.amd": "false" },
  legalComments: "eof", banner: { js: "/*! Part of plotly.js, MIT licence: see LICENSE */" }, plugins: [smaller], outfile: process.argv[2],
});
