-- needs: session
-- ARGV: uri, token, most subscriptions
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return 'gone'
end
local uris = base .. ':u'
if redis.call('HEXISTS', uris, ARGV[1]) == 0 and redis.call('HLEN', uris) >= tonumber(ARGV[3]) then
    return 'full'
end
redis.call('HSET', uris, ARGV[1], ARGV[2])
share_lifetime(uris)
return ends == 'inf' and 'for ever' or 'subscribed'
