-- needs: session
-- ARGV: now, idle
local ends = redis.call('HGET', base, 'ends')
local now = tonumber(ARGV[1])
if ends and now < seconds(ends) then
    move_deadline(now, tonumber(ARGV[2]), seconds(ends))
end
return false
