"""colibri families: what is supported."""

from __future__ import annotations

from colibri_offload.cli.flags import Json
from colibri_offload.cli.output import print_json, table


def families(json: Json = False) -> None:
    """List the supported architectures, weight formats and quants."""
    from colibri_offload.checkpoint.hub_quant import SCHEMES  # late: --help needs no compiler
    from colibri_offload.convert.quants import QUANTS
    from colibri_offload.families.registry import FAMILIES
    from colibri_offload.jit.formats import FORMATS

    rows = [{"model_types": list(f.model_types), "gguf_arch": f.gguf_arch} for f in FAMILIES]
    if json:
        print_json(
            {
                "families": rows,
                "formats": list(FORMATS),
                "hub_quantisations": list(SCHEMES),
                "quants": {name: quant.about for name, quant in QUANTS.items()},
            }
        )
        return
    print("Architectures (model_type in config.json; general.architecture in GGUF):")
    print(table([(", ".join(f.model_types), f.gguf_arch) for f in FAMILIES], "  "))
    print("Weight formats:\n  " + ", ".join(FORMATS))
    print("Quantised hub checkpoints (quant_method):\n  " + ", ".join(SCHEMES))
    print("convert --quant:")
    print(table([(name, quant.about) for name, quant in QUANTS.items()], "  "))
