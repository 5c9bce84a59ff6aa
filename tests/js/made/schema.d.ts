// What kohya_like/page.py serves as schema.js: what form.py's schema_json() says.

export interface Need {
  name: string;
  values: string[];
  but: boolean;
}

export interface Spec {
  name: string;
  label: string;
  help: string;
  control: "check" | "select" | "number" | "size" | "numbers" | "lines" | "prompts" | "start" | "gpus" | "area" | "text";
  default: any;
  group: string;
  choices?: string[];
  suggestions?: string[];
  needs?: Need[];
  unless?: string;
  fold?: string;
  range?: string;
  unit?: string;
  path?: "file" | "folder";
  basic?: boolean;
  optional?: boolean;
  required?: boolean;
  fractions?: boolean;
  ofFamily?: boolean;
}

export interface Block {
  about: string;
  fields: number[];
}

export interface TrainingMode {
  name: string;
  label: string;
  about: string;
  method: string;
  title: string;
  opens: boolean;
  first: string[];
  hidden: string[];
}

declare const schema: {
  fields: Spec[];
  runs: Record<string, { label: string; script: string; groups: { title: string; blocks: Block[] }[] }>;
  families: Record<string, string>;
  modes: TrainingMode[];
  former: Record<string, string>;
};
export default schema;
