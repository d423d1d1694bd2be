"""Statistics of routers and neurons on text, and predictors learned from it."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.statistics.partial import PartialStates
    from moe_pack.calib.statistics.paths import (
        COVERED_PERCENTS,
        LayerRecall,
        PathCoverage,
        accumulated_frequency,
        evaluate,
        learn_paths,
        path_coverage,
    )
    from moe_pack.calib.statistics.popularity import (
        MIN_TOKENS,
        QUANTILE_LEVELS,
        LayerStatistics,
        PopularityTest,
        compare_popularity,
        measure_coverage,
        measure_layer,
    )
    from moe_pack.calib.statistics.predictors import (
        USUAL_TRAINING,
        InputFiles,
        LayerInputs,
        LayerPredictors,
        Shares,
        cost,
        judge_by_routes,
        predict_layer,
        shapes_for,
        train,
    )
else:
    __getattr__ = face(__name__)

__all__ = [
    "COVERED_PERCENTS",
    "MIN_TOKENS",
    "QUANTILE_LEVELS",
    "USUAL_TRAINING",
    "InputFiles",
    "LayerInputs",
    "LayerPredictors",
    "LayerRecall",
    "LayerStatistics",
    "PartialStates",
    "PathCoverage",
    "PopularityTest",
    "Shares",
    "accumulated_frequency",
    "compare_popularity",
    "cost",
    "evaluate",
    "judge_by_routes",
    "learn_paths",
    "measure_coverage",
    "measure_layer",
    "path_coverage",
    "predict_layer",
    "shapes_for",
    "train",
]
