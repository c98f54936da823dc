"""The site: built strictly, nothing fetched by a page, a heading for every public name; notebooks run."""

import html.parser
import inspect
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest
from test_readme import ROOT, blocks

import jaxattn as ja
import jaxattn.linen
import variants
from jaxattn import check, masks, sharding

sys.path.insert(0, str(ROOT / "docs"))
from figures import draw
from notebooks import run

# The elements that a browser fetches by themselves; a link to another site is only followed by its reader.
FETCHED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src", "object": "data"}
RELATIONS = {
    "stylesheet",
    "icon",
    "shortcut",
    "preload",
    "prefetch",
    "preconnect",
    "modulepreload",
    "manifest",
}


def mkdocs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *arguments],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> pathlib.Path:
    """The folder that one command writes."""
    folder = tmp_path_factory.mktemp("site")
    made = mkdocs("--site-dir", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


class Fetches(html.parser.HTMLParser):
    """The addresses that a browser fetches for a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found = re.findall(r"url\(['\"]?([^)'\"]*)", text)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag in FETCHED and named.get(FETCHED[tag]):
            self.found.append(named[FETCHED[tag]])
        if tag == "link" and set((named.get("rel") or "").split()) & RELATIONS:
            self.found.append(named["href"])
        if "mermaid" in (named.get("class") or "").split():
            self.found.append("https://unpkg.com/mermaid")  # what the theme loads for such a block


def outside(addresses: list[str]) -> list[str]:
    return [address for address in addresses if re.match(r"(?:[a-z]+:)?//", address)]


def test_nothing_is_fetched_when_a_page_is_read(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        found = Fetches(page.read_text()).found
        assert found and not outside(found), (page.name, outside(found))
    for style in site.rglob("*.css"):
        text = style.read_text()
        assert not outside(re.findall(r"url\(['\"]?([^)'\"]*)", text)) and "@import" not in text, style.name


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://unpkg.com/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.googleapis.com/css">',
        "<style>@font-face { src: url(https://a.b/c.woff2) }</style>",
        '<pre class="mermaid"><code>graph</code></pre>',
    ],
)
def test_what_is_fetched_is_seen(planted):
    assert outside(Fetches(planted).found)
    assert not outside(Fetches('<a href="https://a.b">a</a><script src="../a.js"></script>').found)


def public(module: types.ModuleType) -> dict[str, object]:
    """The public names of a module: `__all__`, or what is ours and has no underscore in front."""
    ours = lambda value: getattr(value, "__module__", "jaxattn").startswith("jaxattn")
    if hasattr(module, "__all__"):
        names = module.__all__
    else:
        names = [name for name, value in vars(module).items() if not name.startswith("_") and ours(value)]
    values = {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    return {name: value for name, value in values.items() if not inspect.ismodule(value)}


def named(path: str) -> object:
    """What a heading such as jaxattn.HeadSpec or jaxattn.attention.attention is about."""
    *modules, name = path.split(".")
    if ".".join(modules) in sys.modules:  # where a module and what it defines have one name
        return getattr(sys.modules[".".join(modules)], name)
    return getattr(named(".".join(modules)), name)


def test_every_public_name_has_its_heading(site):
    wanted = {**public(ja), **public(masks), **public(check), **public(variants)}
    own = inspect.getmembers(sharding, lambda value: getattr(value, "__module__", "") == sharding.__name__)
    wanted |= {f"jaxattn.sharding.{name}": value for name, value in own if not name.startswith("_")}
    wanted |= {name: named(name) for name in ("jaxattn.Manifest", "jaxattn.admit")}
    linen = jaxattn.linen
    wanted |= {"linen": linen.MultiHeadDotProductAttention, "linen, again": linen.MultiHeadAttention}
    for name in ("LATER", "TYPE_CHECKING"):  # how names are found, no names of the library
        wanted.pop(f"jaxattn.{name}", None)
    assert len(wanted) > 100
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    shown = [named(path) for path in re.findall(r'<h2 id="([\w.]+)"', pages) if "." in path]
    missing = [name for name, value in wanted.items() if not any(value is other for other in shown)]
    assert not missing, f"docs/reference lacks {missing}. Fix: a line '::: {missing[0]}' on one of its pages."


def test_docstrings_become_pages(site):
    """Doctests are code blocks, options of a variant are its signature, products are not taken for tags."""
    page = (site / "reference/variants.html").read_text()
    text = re.sub(r"<[^>]*>", "", page)
    assert "softmax_heads: int | None = None" in text and "dropout_over_queries: bool = False" in text
    for page in sorted((site / "reference").glob("*.html")):
        text = page.read_text()
        assert text.count("&gt;&gt;&gt;") == len(re.findall(r'<span class="gp">&gt;&gt;&gt;', text)), (
            page.name
        )
        assert "```" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL), page.name


def test_formulas_have_what_draws_them(site):
    page = (site / "choose.html").read_text()
    assert 'class="arithmatex"' in page and "assets/katex/katex.min.js" in page
    styles = (site / "assets/katex/katex.min.css").read_text()
    fonts = set(re.findall(r"url\((fonts/[^)]*)\)", styles))
    assert fonts and all((site / "assets/katex" / font).exists() for font in fonts)


@pytest.mark.parametrize("text", ["[away](nowhere.md)", "[away](#nowhere)", "::: jaxattn.nothing"])
def test_a_broken_link_or_reference_fails(text, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n{text}\n")
    config = tmp_path / "mkdocs.yml"
    plugins = f"plugins:\n  - mkdocstrings:\n      handlers:\n        python: {{paths: ['{ROOT}']}}\n"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {tmp_path / 'docs'}\nnav: [index.md]\n{plugins}"
    )
    made = mkdocs("--config-file", str(config), "--site-dir", str(tmp_path / "site"))
    assert made.returncode != 0 and re.search("nowhere|nothing", made.stderr), made.stderr


@pytest.fixture
def as_a_reader():
    """float32, as a reader's session starts."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.heavy
@pytest.mark.parametrize("name", run.NAMES)
def test_notebook_runs_and_its_page_is_of_this_notebook(name, tmp_path, as_a_reader):
    run.main([name], tmp_path)
    own = [cell.text for cell in run.cells((ROOT / f"docs/notebooks/{name}.py").read_text())]
    shown = (ROOT / f"docs/notebooks/{name}.md").read_text()
    stale = [text for text in own if text not in shown]
    assert not stale, f"Fix: python docs/notebooks/run.py {name}"
    pictures = {path.name for path in tmp_path.glob("*.svg")}
    assert pictures == {path.name for path in (ROOT / "docs/notebooks").glob(f"{name}-*.svg")}


@pytest.mark.heavy
def test_figures_are_drawn(tmp_path, as_a_reader):
    draw.main(tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name for path in (ROOT / "docs/figures").glob("*.svg")}
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert all(f"figures/{name}" in pages for name in drawn)


@pytest.mark.heavy
def test_the_page_on_sharding_runs_on_four_devices(tmp_path):
    program = tmp_path / "page.py"
    code = "\n".join(blocks(ROOT / "docs/tasks/shard.md"))
    program.write_text(f"{code}\nassert jax.device_count() == 4, jax.devices()\n")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_version_everywhere():
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", cited, re.MULTILINE) == [ja.__version__]
    assert f"version = {{{ja.__version__}}}" in (ROOT / "docs/cite.md").read_text()
    assert re.search(rf"^## {re.escape(ja.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_a_tag_is_the_version():
    """Where the checkout has a tag on it, it is the version, with or without a v in front."""
    asked = ["git", "tag", "--points-at", "HEAD"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    tags = found.stdout.split() if found.returncode == 0 else []  # an unpacked archive has no history
    assert all(tag.removeprefix("v") == ja.__version__ for tag in tags), tags
