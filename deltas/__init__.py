"""What is changed in vLLM and why: one file a feature. These files know nothing of how patching works."""
