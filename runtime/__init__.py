"""Runs packs: the engine, its text, and what it reports."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.doctor import measure_disk, measure_machine
    from moe_pack.runtime.engine.engine import Engine
    from moe_pack.runtime.engine.machine import (
        USUAL_DISK,
        DiskFacts,
        FixedCosts,
        MachineFacts,
        WidthRate,
        available_bytes,
        give_back_freed,
        give_back_large_at_once,
        load_facts,
        save_facts,
        total_bytes,
    )
    from moe_pack.runtime.engine.options import DEVICE_OPTION, EngineOptions, SamplingOptions
    from moe_pack.runtime.engine.report import RunReport, report, report_lines
    from moe_pack.runtime.generate import BenchTimes, context_for, measure, random_prompt
    from moe_pack.runtime.loaded_model import Model, load
    from moe_pack.runtime.sampling import Sampler
    from moe_pack.runtime.templates import ChatTemplate, chat_prompt
    from moe_pack.runtime.text import Text
else:
    __getattr__ = face(__name__)
