"""The InferenceDeployment as frozen values, and the names that mark our objects."""
