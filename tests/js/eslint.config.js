import js from "@eslint/js";
import globals from "globals";

export default [
  { ignores: ["**/vendor/**", "**/node_modules/**"] },
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2023, globals: globals.browser },
    rules: {
      "consistent-return": "off",
      curly: ["error", "multi-line"],
      // Python's ends of lines are among them.
      "no-control-regex": "off",
      eqeqeq: "error",
      "no-implicit-globals": "error",
      "no-restricted-globals": ["error", "event", "name", "parent", "self", "status", "top"],
      "no-restricted-properties": ["error", { property: "innerHTML", message: "Text enters the page through textContent." }, { property: "outerHTML" }, { property: "insertAdjacentHTML" }],
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
  { files: ["**/*.test.js", "**/eslint.config.js", "**/tests/js/**"], languageOptions: { globals: globals.node } },
];
