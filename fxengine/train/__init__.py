"""What training needs besides the network: parameter groups, gradient norms, clip, Adam."""
