export function h(...given: any[]): any;
export function render(...given: any[]): void;
