// The page's background, and the elements whose text stands out from what is behind it by less than 4.5 : 1 (WCAG 2 AA).
() => {
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const channel = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
  const poor = [...document.querySelectorAll("body *")].filter((node) => {
    if (!hasText(node) || !node.checkVisibility() || node.disabled) return false;
    const [dark, light] = [numbers(getComputedStyle(node).color), behind(node)].map(luminance).sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05) < 4.5;
  });
  return [getComputedStyle(document.body).backgroundColor, poor.map((node) => node.outerHTML.slice(0, 80))];
}
