const rows = [...document.querySelectorAll("tbody tr")];
const selects = [...document.querySelectorAll("select")];
const picks = [...document.querySelectorAll("input[type=checkbox]")];
const told = document.getElementById("told");
const filter = () => {
  for (const row of rows)
    row.hidden = selects.some((s) => s.value &&
      !(s.name === "image" ? row.dataset.image.split(" ") : [row.dataset[s.name]]).includes(s.value));
  document.getElementById("shown").textContent = rows.filter((row) => !row.hidden).length;
};
const compare = () => {
  const chosen = picks.filter((p) => p.checked);
  for (const p of picks) p.disabled = chosen.length === 2 && !p.checked;
  told.textContent = chosen.length === 2 ? "" : "Choose two runs to see them side by side. 选择两次运行以并排比较。";
  if (chosen.length !== 2) return;
  const folder = told.dataset.folder;
  const [newer, older] = chosen.map((p) => p.value);
  const link = [...document.querySelectorAll("a[data-first]")]
    .find((a) => a.dataset.first === older && a.dataset.second === newer);
  if (link) {
    told.append(link.cloneNode(true));
  } else {
    const code = document.createElement("code");
    code.textContent = `nox -s compare -- ${folder}/${older} ${folder}/${newer} --html compare.html`;
    told.append(code);
  }
};
for (const s of selects) s.onchange = filter;
for (const p of picks) p.onchange = compare;
document.getElementById("tools").hidden = false;
for (const p of picks) p.hidden = false;
filter();
compare();
