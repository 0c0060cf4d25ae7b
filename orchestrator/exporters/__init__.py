"""Where signals go: Prometheus, TensorBoard, Weights & Biases. They know rows of declared metrics, never the loop."""
