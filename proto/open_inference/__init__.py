"""Package inference: the published interface of model servers, stated here, in a descriptor pool of its own.

A process that also has another statement of the same package, such as tritonclient's or KServe's, has no clash.
"""
