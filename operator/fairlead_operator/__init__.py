"""The Kubernetes side: one InferenceDeployment becomes running pods, scaled on queue depth. No
torch in here.
"""
