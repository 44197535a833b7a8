"""Sphinx configuration: python -m sphinx -W --keep-going -b html docs docs/_build/html."""

import ast
import dataclasses
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import codec_jax  # noqa: E402

project = "codec_jax"
author = "the codec_jax authors"
version = release = codec_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.programoutput"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"codec_jax {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_theme_options = {"light_css_variables": {"code-font-size": "0.75rem"}}
myst_heading_anchors = 4

# The commands of this Python say what they do, in lines that the theme has room for.
os.environ.update(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", COLUMNS="100")

# Backticks in docstrings are code, and links where they name something that is documented.
default_role = "py:obj"
add_module_names = False
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # `_readable_signature` writes them
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"


def setup(app):
    """Connect what follows."""
    app.connect("source-read", _list_results)
    app.connect("autodoc-process-signature", _readable_signature)
    app.connect("autodoc-process-docstring", _list_fields, priority=400)  # before napoleon
    app.connect("doctree-read", _show_paths)


def _list_results(app, docname, source):
    """Put the pages of results below the page that lists them, which is written by a program for readers of files."""
    if docname == "results/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n*\n```\n"


def _readable(code):
    """Write Float[Array, "B T"] as Float[B, T], whatever kind of array it is."""
    shape = r"""(Float|Int|UInt16|UInt32|Bool|Key)\[[\w.]+, ['"] ?([^'"]*)['"]\]"""
    return re.sub(shape, lambda m: f"{m[1]}[{', '.join(m[2].split()) or '()'}]", code)


def _source(obj):
    return ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]


def _has_fields(obj):
    """Whether a class is a dataclass or a named tuple."""
    return dataclasses.is_dataclass(obj) or hasattr(obj, "_fields")


def _readable_signature(app, what, name, obj, options, signature, returns):
    """Sign functions as their source does; classes of fields and protocols need no signature."""
    if what == "class" and (_has_fields(obj) or getattr(obj, "_is_protocol", False)):
        return "", None
    if what not in ("class", "function", "method"):
        return None
    function = _source(obj.__init__ if what == "class" else obj)
    if what != "function":
        (function.args.posonlyargs or function.args.args).pop(0)
    gives = ast.unparse(function.returns)
    return f"({_readable(ast.unparse(function.args))})", None if gives == "None" else _readable(gives)


def _fields(obj):
    """Yield the lines of a class of ours and each of its fields, those of the classes that it is made of first."""
    for base in reversed(obj.__mro__):
        if base.__module__.partition(".")[0] in ("codec_jax", "pallas_kernels"):
            source = textwrap.dedent(inspect.getsource(base)).splitlines()
            yield from ((source, node) for node in _source(base).body if isinstance(node, ast.AnnAssign))


def _list_fields(app, what, name, obj, options, lines):
    """Add the fields of a class with the comments beside them, which is where the source explains them."""
    if what != "class" or not _has_fields(obj):
        return
    if lines[0].startswith("Create new instance of"):  # what Python says of named tuples
        lines.clear()
        return
    lines += ["", "Fields:", ""]
    for source, field in _fields(obj):
        comment = source[field.end_lineno - 1][field.end_col_offset :].partition("#")[2].strip()
        value = ast.unparse(field.value) if field.value else "field("
        default = "" if value.startswith("field(") else f" = {value}"
        text = f"``{field.target.id}: {_readable(ast.unparse(field.annotation))}{default}``"
        lines.append(f"- {text}: {comment}" if comment else f"- {text}")
    lines.append("")


def _show_paths(app, doctree):
    """Show links to pages and folders outside of docs, which a site does not have, as their paths."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = (Path(doctree["source"]).parent / link["reftarget"]).resolve()
        for path in (target, target.with_name(target.name + ".md")):
            if link["reftype"] == "myst" and path.exists() and not path.is_relative_to(ROOT / "docs"):
                shown = nodes.literal("", str(path.relative_to(ROOT)))
                link.replace_self([*link.children, nodes.Text(" ("), shown, nodes.Text(")")])
                break
