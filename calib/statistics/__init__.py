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
