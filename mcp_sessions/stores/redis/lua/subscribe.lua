-- needs: session uris
-- ARGV: uri, token, most subscriptions, most bytes of them. What came of it, and what changed the
-- subscriptions before.
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return { 'gone' }
end
local uris = base .. ':u'
if redis.call('HEXISTS', uris, ARGV[1]) == 0 and redis.call('HLEN', uris) >= tonumber(ARGV[3]) then
    return { 'max_subscriptions' }
end
if redis.call('HEXISTS', uris, ARGV[1]) == 0 then
    local counted = uri_bytes(uris, #ARGV[1], tonumber(ARGV[4]))
    if not counted then
        return { 'max_subscription_bytes' }
    end
    redis.call('HSET', base, 'ub', counted)
end
redis.call('HSET', uris, ARGV[1], ARGV[2])
share_lifetime(uris)
local before = redis.call('HGET', base, 'uris')
redis.call('HSET', base, 'uris', ARGV[2])
return { ends == 'inf' and 'for ever' or 'subscribed', before }
