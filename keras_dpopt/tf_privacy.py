"""The only module that imports TensorFlow Privacy.

`import tensorflow_privacy` fails under Keras 3, because it pulls in
tensorflow-estimator. With `sys.skip_tf_privacy_import` set, the package imports empty
and its query modules, which do not depend on Keras, load one by one.
"""

import sys
from typing import Any

sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]

from tensorflow_privacy.privacy.dp_query import (  # noqa: E402
    dp_query as _dp_query,
)
from tensorflow_privacy.privacy.dp_query import (  # noqa: E402
    normalized_query as _normalized_query,
)

SumAggregationDPQuery = _dp_query.SumAggregationDPQuery
NormalizedQuery = _normalized_query.NormalizedQuery


def noise_stddev(global_state: Any) -> Any:
    """Returns the noise standard deviation on the sum that a query's state tells.

    Args:
        global_state: Global state of a TF Privacy sum query.

    Returns:
        Scalar, or `None` where the state does not have it: `GaussianSumQuery` keeps it
        as `stddev`, adaptive queries one level down in `sum_state`.
    """
    state = getattr(global_state, "sum_state", global_state)
    return getattr(state, "stddev", None)


def l2_norm_clip(global_state: Any) -> Any:
    """Returns the clipping norm that a query's state tells, or `None`."""
    state = getattr(global_state, "sum_state", global_state)
    return getattr(state, "l2_norm_clip", None)
