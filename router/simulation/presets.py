"""Hardware and models to simulate: prefill and decode constants of one node, and the model's KV.

Sources: prefill of gpt-oss-120b on one H200 is fitted to published times (0.7 % error); Qwen3 on H800/H20 are
published constants. Llama-3.1-70B on eight H100 follows from 137 GFLOP per token and 2.6 MFLOP per pair at 40 % of
the peak. Decode constants follow from weight and KV bytes at 60 % of HBM bandwidth.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.layout import KVLayout
from router.estimators import PrefillCurve
from router.simulation.models import model_layout


@dataclass(frozen=True, slots=True)
class Preset:
    """One node and the model it serves.

    Attributes:
        curve: prefill time of one pass.
        step_ns: fixed time of a step that only decodes.
        sequence_ns: extra time of a step per decoding sequence.
        context_ns: extra time of a step per token of context that decodes.
        chunk_tokens: tokens computed per step.
        max_running: sequences that decode at once.
        alpha_ns: latency of a load.
        capacity_blocks: KV blocks the node keeps in its device.
        host_blocks: KV blocks it keeps in its host of those that left the device; 0 is no host tier.
        host_bytes_per_s, host_alpha_ns: the way from the host to the device. One PCIe 5 ×16 link, which is little for
            a node of several GPUs.
        ttft_slo_ns, tpot_slo_ns: limits that count as good.
    """

    name: str
    layout: KVLayout
    curve: PrefillCurve
    step_ns: float
    sequence_ns: float
    context_ns: float
    chunk_tokens: int = 2048
    max_running: int = 256
    alpha_ns: int = 1_000_000
    capacity_blocks: int = 2400
    host_blocks: int = 0
    host_bytes_per_s: float = 50e9
    host_alpha_ns: int = 50_000
    ttft_slo_ns: int = 5_000_000_000
    tpot_slo_ns: int = 100_000_000

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes by which a long prefix grows per block of this many tokens."""
        return self.layout.growing_block_bytes * block_tokens // self.layout.block_tokens

    def b_star_bytes_per_s(self, tokens: int = 8192) -> float:
        """Bandwidth at which loading ``tokens`` takes as long as redoing them."""
        return 1e9 * self.layout.prefix_bytes(tokens) / self.curve.time_ns(tokens, 0)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="llama-70b",  # 8 × H100
            layout=model_layout("Llama-3.1-70B"),
            curve=PrefillCurve(t0_ns=20e6, token_ns=43_200.0, pair_ns=0.83),
            step_ns=15e6,
            sequence_ns=50e3,
            context_ns=0.02,
        ),
        Preset(
            name="gpt-oss-120b",  # one H200
            layout=model_layout("gpt-oss-120b (18 SWA128 + 18 full)"),
            curve=PrefillCurve(t0_ns=30.3e6, token_ns=18_990.0, pair_ns=0.61),
            step_ns=8e6,
            sequence_ns=100e3,
            context_ns=0.013,
            capacity_blocks=3200,
        ),
        Preset(
            name="qwen3-8b",  # 8 × H800
            layout=model_layout("Qwen3-8B"),
            curve=PrefillCurve(t0_ns=44e6, token_ns=18_900.0, pair_ns=0.1),
            step_ns=8e6,
            sequence_ns=30e3,
            context_ns=0.01,
            alpha_ns=390_000,
            capacity_blocks=7000,
        ),
        Preset(
            name="qwen3-235b",  # 8 × H20
            layout=model_layout("Qwen3-235B-A22B"),
            curve=PrefillCurve(t0_ns=108e6, token_ns=32_000.0, pair_ns=4.19),
            step_ns=20e6,
            sequence_ns=80e3,
            context_ns=0.01,
            alpha_ns=1_830_000,
            capacity_blocks=3500,
        ),
    )
}


def get_preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    found = PRESETS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown model preset {name!r}{hint} Known: {', '.join(sorted(PRESETS))}", preset=name)
    return found
